"""What a user runs, as named programs of a configuration, traced from shapes alone.

All that is known here of the rest of the package is how those programs are called.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stepprune_jax import policy
from stepprune_jax.bench.memory import MODELS, model_config
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.frozen import model_folders
from stepprune_jax.config import LlavaConfig
from stepprune_jax.generate import decoding
from stepprune_jax.generate.placement import jit_for_weights, row_count
from stepprune_jax.models import vlm
from stepprune_jax.policy import FeatureStats, Picks, Pruned
from stepprune_jax.policy.layers import compute_dtype
from stepprune_jax.sharding import BATCH_RULES, shardings
from stepprune_jax.training import plan, step
from stepprune_jax.training.batches import Bucket
from stepprune_jax.training.language_loss import row_losses
from stepprune_jax.training.settings import check_config, make_setup

# Name to the dtypes of the frozen model and of the policy.
DTYPES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "mixed": ("bfloat16", "float32"),
}
NEW_TOKENS = 32  # longest answer

# Rows of the programs that read a question; the others take the configuration's batch.
_PICKS = (1, 2, 8)

_WHOLE = ((r".*", P()),)


def load_config(name: str) -> Any:
    """Reads and checks a configuration file.

    Args:
        name: its path, with an argument after a colon: "configs/shapes.py:literal".

    Returns:
        The `ConfigDict`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is bad.
    """
    file, _, argument = name.partition(":")
    if not Path(file).is_file():
        raise FileNotFoundError(f"--config: no file at {file}")
    if str(Path.cwd()) not in sys.path:  # configurations import each other
        sys.path.insert(0, str(Path.cwd()))
    spec = importlib.util.spec_from_file_location(f"configuration_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*filter(None, [argument]))
    check_config(config)
    return config


def model_of(config: Any) -> LlavaConfig:
    """The shape of a configuration's model; those of the published LLaVA-v1.5 need no folder."""
    name = config.model.folder.lower().removeprefix("llava-hf/").removesuffix("-hf")
    name = name.replace("llava-1.5", "llava")
    return model_config(name) if name in MODELS else inspect_folder(*model_folders(config)).config


class Programs:
    """The programs of a configuration on a mesh; each is a function that traces it."""

    def __init__(self, config: Any, mesh: Mesh, dtype: str):
        """Reads the configuration.

        Args:
            config: from `load_config`.
            mesh: of a target's devices, from `build_mesh`.
            dtype: of `DTYPES`.

        Raises:
            ValueError: the configuration does not fit the mesh.
        """
        frozen, own = DTYPES[dtype]
        config = config.copy_and_resolve_references()
        if config.method == "stepprune":
            config.policy.dtype = own
        self._rows, self._mesh, self._dtype = config.batch_size, mesh, jnp.dtype(frozen)
        self._setup = make_setup(config, model_of(config), mesh)
        unit = config.data.length_multiple
        self._bucket = Bucket(ids=5 * unit, text=unit, targets=2 * unit)

    def names(self) -> tuple[str, ...]:
        """What there is to trace."""
        return tuple(self._table())

    def trace(self, name: str) -> Any:
        """Traces a program; the result has `lower`.

        Args:
            name: one of `names`.
        """
        return self._table()[name]()

    def _table(self) -> dict[str, Callable[[], Any]]:
        table = {
            "update": self._update,
            "validation": self._validation,
            "tower": self._tower,
            "prefill": self._prefill,
            "decode": self._decode,
        }
        if isinstance(self._setup.selector, policy.PolicyConfig):
            table |= {
                "encode": self._encode,
                "select": functools.partial(self._choose, policy.select, self._rows),
                "select_parallel": functools.partial(
                    self._choose, policy.select_parallel, self._rows
                ),
                "gather": self._gather,
            }
            for rows in _PICKS:
                table[f"pick {rows}"] = functools.partial(self._choose, policy.pick, rows)
        return table

    def _place(self, tree: Any, rules: Any = _WHOLE) -> Any:
        """Shapes with the shardings of the rules."""
        return jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
            tree, shardings(tree, rules, self._mesh),
        )  # fmt: skip

    def _by_rows(self, rows: int, *shapes: tuple[tuple[int, ...], Any]) -> list[Any]:
        """Shapes behind a row axis, which is split where the mesh divides it."""
        tree = [jax.ShapeDtypeStruct((rows, *shape), dtype) for shape, dtype in shapes]
        return self._place(tree, _WHOLE if rows % row_count(self._mesh) else BATCH_RULES)

    @functools.cached_property
    def _weights(self) -> Any:
        return plan.abstract_weights(self._setup, self._mesh, self._dtype)

    @functools.cached_property
    def _policy(self) -> Any:
        return self._place(policy.abstract_policy(self._setup.selector))

    def _update(self) -> Any:
        return plan.trace_update(self._setup, self._mesh, self._dtype, self._rows, self._bucket)

    def _tower(self) -> Any:
        side, width = self._model.vision.image_size, self._model.vision.hidden_size
        stats = self._place(jax.eval_shape(lambda: FeatureStats.start(width)))
        pixels, real = self._by_rows(self._rows, ((3, side, side), jnp.float32), ((), bool))
        return step.gather_stats.trace(
            self._weights, stats, pixels, real, setup=self._setup, mesh=self._mesh
        )

    def _validation(self) -> Any:
        kept = -(-self._model.num_image_tokens // 4)
        width, rows = self._model.vision.hidden_size, self._rows
        pruned = Pruned(*self._by_rows(
            rows, ((kept,), jnp.int32), ((kept, width), self._dtype), ((kept,), bool),
            ((), jnp.int32),
        ))  # fmt: skip
        targets = plan.abstract_batch(self._setup, rows, self._bucket).targets
        reading = self._setup.reading(self._mesh)._replace(rows=0)
        losses = jit_for_weights(row_losses, ("reading",))
        targets = self._place(targets, BATCH_RULES)
        return losses.trace(self._weights, reading=reading, kept=pruned, targets=targets)

    def _encode(self) -> Any:
        n, text, config = self._model.num_image_tokens, self._bucket.text, self._setup.selector
        image, words, mask = self._by_rows(
            self._rows, ((n, config.feature_width), self._dtype),
            ((text, config.text_width), self._dtype), ((text,), bool),
        )  # fmt: skip

        def encode(params, image, words, mask):
            return policy.memory(
                params, policy.encode(params, config, image, words, text_mask=mask)
            )

        return jax.jit(encode).trace(self._policy, image, words, mask)

    def _choose(self, function: Callable[..., Any], rows: int) -> Any:
        """`select`, `select_parallel` or `pick`."""
        config = self._setup.selector
        dtype = compute_dtype(config, self._dtype)
        slots = (self._model.num_image_tokens + 1, config.policy_width)
        (memory,) = self._by_rows(rows, (slots, dtype))
        return jax.jit(function, static_argnames="config").trace(self._policy, config, memory)

    def _gather(self) -> Any:
        n, width = self._model.num_image_tokens, self._model.vision.hidden_size
        steps = self._setup.selector.steps(n)
        action, count, selected, features = self._by_rows(
            self._rows, ((steps,), jnp.int32), ((), jnp.int32), ((n,), bool),
            ((n, width), self._dtype),
        )  # fmt: skip
        function = jax.jit(policy.gather, static_argnames="capacity")
        return function.trace(Picks(action, count, selected), features, capacity=max(1, n // 4))

    def _prefill(self) -> Any:
        return decoding.run_start.trace(
            self._weights, self._model, *self._question, max_tokens=NEW_TOKENS,
            attention=self._setup.attention, mesh=self._mesh,
        )  # fmt: skip

    def _decode(self) -> Any:
        sequence, keys, settings = self._question
        state = jax.eval_shape(
            functools.partial(
                decoding.start, config=self._model, max_tokens=NEW_TOKENS,
                attention=self._setup.attention,
            ),
            self._weights, sequence=sequence, keys=keys, settings=settings,
        )  # fmt: skip
        state = self._place(state)
        limit = self._place(jax.ShapeDtypeStruct((), jnp.int32))
        return decoding.run_decode.trace(
            self._weights, self._model, state, settings, limit, mesh=self._mesh
        )

    @property
    def _model(self) -> LlavaConfig:
        return self._setup.model

    @functools.cached_property
    def _question(self) -> tuple[Any, Any, Any]:
        """One row with all visual tokens, its key, and the settings."""
        length = self._bucket.text + self._model.num_image_tokens - 1
        embeddings, position, size, following = self._by_rows(
            1, ((length, self._model.text.hidden_size), self._dtype), ((length,), jnp.int32),
            ((), jnp.int32), ((), jnp.int32),
        )  # fmt: skip
        keys = jax.eval_shape(lambda: decoding.row_keys(jax.random.key(0), 1))
        number = jax.ShapeDtypeStruct((), jnp.float32)
        stops = jax.ShapeDtypeStruct((1,), jnp.int32)
        settings = decoding.Settings(number, number, stops)
        keys, settings = self._place((keys, settings))
        return vlm.Sequence(embeddings, position, size, following), keys, settings
