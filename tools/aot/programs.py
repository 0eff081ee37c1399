"""Traces the programs of a run by name, from shapes without arrays."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from stepprune_jax.efficiency.model_shapes import KNOWN, find_backbone
from stepprune_jax.inference import decoding, programs
from stepprune_jax.inference.base import Pairs, Plan, PromptLayout
from stepprune_jax.inference.sampling import Sampling, greedy
from stepprune_jax.models import vlm
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.weights import join_kernels
from stepprune_jax.parallel.placement import decodes_by_step, row_count, uses_joined_weights
from stepprune_jax.parallel.programs import jit_for_weights
from stepprune_jax.parallel.sharding import BATCH_RULES, shardings
from stepprune_jax.policy import FeatureStats, Pruned
from stepprune_jax.policy.layers import compute_dtype
from stepprune_jax.policy.rollout import start_episode
from stepprune_jax.policy.selection import choose_tokens, select_parallel
from stepprune_jax.pruning import Budget, FastV, Kept, Pruner
from stepprune_jax.registry import PRUNERS
from stepprune_jax.selectors import Policy
from stepprune_jax.training import Run, dry_run, step
from stepprune_jax.training.batches import Bucket
from stepprune_jax.training.language_loss import ForwardOptions, row_scores
from stepprune_jax.training.step_config import make_step_config

# Dtypes of the frozen model and of the selector, by name.
DTYPES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "mixed": ("bfloat16", "float32"),
}
NEW_TOKENS = 32  # Length limit of answers.

# Batch sizes of the programs that select tokens.
ROWS = (1, 2, 8)

_REPLICATED = ((r".*", P()),)


def backbone_of(run: Run) -> Backbone:
    """Returns the model of a run. Published models need no folder."""
    name = run.model.folder.lower().removeprefix("llava-hf/").removesuffix("-hf")
    name = name.removeprefix("qwen/").removesuffix("-instruct").replace("llava-1.5", "llava")
    name = name.replace("llava-v1.6-vicuna", "llava-next")
    if name not in KNOWN:
        return run.model.inspect().backbone
    return find_backbone(name).bound_images(None, **run.model.image_bounds)


class Programs:
    """The programs of a run on a mesh."""

    def __init__(self, run: Run, mesh: Mesh, dtype: str):
        """Builds the static arguments of the programs.

        Args:
            run: configuration of the run.
            mesh: the mesh.
            dtype: a key of `DTYPES`.
        """
        model_dtype, selector_dtype = DTYPES[dtype]
        group = PRUNERS[run.method].settings
        run = run.replace({f"{group}.dtype": selector_dtype})
        self._rows, self._mesh, self._dtype = run.batch_size, mesh, jnp.dtype(model_dtype)
        self._backbone = backbone_of(run)
        self._model = self._backbone.config
        self._setup, self._execution = (
            make_step_config(run, self._backbone, mesh),
            run.model.execution,
        )
        self._tokens = self._model.max_image_tokens
        unit = run.data.length_multiple
        self._bucket = Bucket(ids=5 * unit, text=unit, targets=2 * unit)

    def names(self) -> tuple[str, ...]:
        """Returns the names of the programs."""
        return tuple(self._table())

    def trace(self, name: str) -> jax.stages.Traced:
        """Traces a program; the result has `lower`."""
        return self._table()[name]()

    def _table(self) -> dict[str, Callable[[], jax.stages.Traced]]:
        table = {
            "update": self._update,
            "statistics": self._statistics,
            "validation": self._validation,
            "tower": self._tower,
            "rank": self._rank,
            "take": self._take,
            "prefill": self._prefill,
            "prefill cut": functools.partial(self._prefill, self._cut),
            "decode": self._decode,
            "decode cut": functools.partial(self._decode, self._cut),
        }
        for rows in ROWS:
            exact_budget = Budget("count", self._kept)
            table[f"select {rows}"] = functools.partial(self._select, exact_budget, rows)
            table[f"answer {rows}"] = functools.partial(self._answer, rows)
        if self._setup.selector.has_stop:
            for rows in ROWS:
                select_by_stop = functools.partial(self._select, Budget("adaptive"), rows)
                table[f"select own {rows}"] = select_by_stop
            table["policy.select_parallel"] = functools.partial(
                self._choose, select_parallel, self._rows
            )
            for rows in ROWS:
                table[f"policy.pick {rows}"] = functools.partial(self._choose, choose_tokens, rows)
        return table

    # Shapes and their shardings.

    def _place(self, tree: PyTree, rules: Sequence[tuple[str, P]] = _REPLICATED) -> PyTree:
        """Returns shapes with shardings by the rules."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            tree,
            shardings(tree, rules, self._mesh),
        )

    def _by_rows(self, tree: PyTree) -> PyTree:
        """Returns shapes with a leading row axis, sharded if the mesh divides its size."""
        rows = jax.tree.leaves(tree)[0].shape[0]
        return self._place(tree, _REPLICATED if rows % row_count(self._mesh) else BATCH_RULES)

    @functools.cached_property
    def _trained_through(self) -> PyTree:
        """Returns the frozen weights as in training, with all layers stacked."""
        return dry_run.abstract_weights(self._setup, self._dtype)

    @functools.cached_property
    def _weights(self) -> PyTree:
        """Returns the frozen weights as loaded for inference."""
        weights = vlm.abstract_params(self._backbone, self._dtype, self._setup.weights)
        if uses_joined_weights(self._mesh.devices.flat[0].platform, self._mesh):
            weights = jax.eval_shape(join_kernels, weights)
        return self._place(weights, self._backbone.SHARDING_RULES)

    @functools.cached_property
    def _policy(self) -> PyTree:
        key = jax.random.key(0)
        return self._place(jax.eval_shape(lambda: self._setup.selector.init_params(key)))

    @functools.cached_property
    def _stats(self) -> PyTree:
        return self._stats_of(self._model.feature_width)

    def _stats_of(self, width: int) -> PyTree:
        return self._place(jax.eval_shape(lambda: FeatureStats.start(width)))

    @property
    def _kept(self) -> int:
        """Returns the number of tokens to keep of an image."""
        return -(-self._tokens // 4)

    @property
    def _cut(self) -> Pruner:
        layer = min(FastV.layer, self._model.text.num_layers - 1)
        return FastV(Budget("count", self._kept), layer)

    def _pixels(self, rows: int) -> PyTree:
        return self._by_rows(self._backbone.largest_pixel_shapes(rows))

    def _features(self, rows: int) -> PyTree:
        return _shape((rows, self._tokens, self._model.token_width), self._dtype)

    def _kept_tokens(self, rows: int, count: int) -> Kept:
        index = _shape((rows, count))
        tokens = _shape((*index.shape, self._model.token_width), self._dtype)
        return self._by_rows(Kept(index, index, tokens, _shape(index.shape, bool), _shape((rows,))))

    def _pairs(self, rows: int) -> Pairs:
        """Returns pairs whose images have passed the tower."""
        row, seed = _shape((rows,)), _shape((rows,), jnp.uint32)
        words, features = _shape((rows, self._bucket.text)), self._features(rows)
        grid = _shape((rows, 2))
        return self._by_rows(Pairs(None, features, (), row, grid, None, words, row, row, seed, row))

    def _texts(self, rows: int, cuts: int = 0) -> PromptLayout:
        """Returns prompts with one image each."""
        column = _shape((rows, 1))
        ids, row = _shape((rows, self._bucket.text)), _shape((rows,))
        is_image, grid = _shape(column.shape, bool), _shape((rows, 1, 2))
        return self._by_rows(PromptLayout(ids, row, column, is_image, grid, (column,) * cuts))

    # Training.

    def _update(self) -> jax.stages.Traced:
        return dry_run.trace_update(self._setup, self._dtype, self._rows, self._bucket)

    def _statistics(self) -> jax.stages.Traced:
        tokens, stats = (
            self._by_rows(_shape((self._rows,))),
            self._stats_of(self._model.token_width),
        )
        return step.gather_stats.trace(
            self._trained_through, stats, self._pixels(self._rows), tokens, config=self._setup
        )

    def _validation(self) -> jax.stages.Traced:
        kept = self._kept_tokens(self._rows, self._kept)
        targets = dry_run.abstract_batch(self._setup, self._rows, self._bucket).targets
        return jit_for_weights(row_scores, ("backbone", "options")).trace(
            self._trained_through,
            backbone=self._backbone,
            options=ForwardOptions(self._execution, mesh=self._mesh),
            kept=Pruned(kept.index, kept.tokens, kept.valid, kept.count),
            targets=self._by_rows(targets),
        )

    # From images to answers: `inference.programs`.

    def _tower(self) -> jax.stages.Traced:
        return programs.run_encode.trace(
            self._weights,
            self._backbone,
            self._pixels(self._rows),
            taps=(),
            plan=Plan(execution=self._execution, mesh=self._mesh),
        )

    def _selector(self, budget: Budget) -> Policy:
        """Returns the selector with the shapes of its weights."""
        pruner = dataclasses.replace(self._setup.selector, budget=budget).program()
        bias = self._place(_shape((), jnp.float32))
        return pruner.replace(params=self._policy, stats=self._stats, stop_bias=bias)

    def _choosing(self, budget: Budget) -> tuple[Policy, Plan]:
        pruner = self._selector(budget)
        capacity = self._kept if budget.is_exact else pruner.longest(self._tokens)
        return pruner, Plan(capacity, execution=self._execution, mesh=self._mesh)

    def _select(self, budget: Budget, rows: int) -> jax.stages.Traced:
        pruner, plan = self._choosing(budget)
        return programs.run_select.trace(
            self._weights, self._backbone, pruner, self._pairs(rows), plan=plan
        )

    def _rank(self) -> jax.stages.Traced:
        pruner = self._selector(Budget("count", self._kept))
        return programs.run_rank.trace(
            self._weights,
            self._backbone,
            pruner,
            self._pairs(self._rows),
            plan=Plan(mesh=self._mesh),
            steps=pruner.longest(self._tokens),
        )

    def _take(self) -> jax.stages.Traced:
        order, count = _shape((self._rows, self._tokens)), _shape((self._rows,))
        arrays = self._by_rows((self._features(self._rows), order, count))
        return programs.run_take.trace(*arrays, capacity=self._kept)

    def _begin(self, pruner: Pruner | None) -> tuple[tuple[PyTree, ...], Plan]:
        """Returns the plan and the array arguments of `programs.prefill`, for all visual tokens."""
        plan = Plan(
            slots=(self._slots(self._tokens),),
            max_tokens=NEW_TOKENS,
            execution=self._execution,
            mesh=self._mesh,
        )
        if pruner is not None:
            plan = dataclasses.replace(
                plan,
                slots=(*plan.slots, self._slots(self._kept)),
                cuts=pruner.cuts(self._model, self._tokens),
            )
        kept, texts = self._kept_tokens(1, self._tokens), self._texts(1, len(plan.cuts))
        program_pruner = None if pruner is None else pruner.program()
        return (program_pruner, kept, texts, self._sampling), plan

    def _slots(self, kept: int) -> int:
        """Returns the length of a question with `kept` visual tokens."""
        return self._bucket.text + kept - 1

    @property
    def _sampling(self) -> Sampling:
        return self._place(jax.eval_shape(lambda: greedy((0,))))

    def _prefill(self, pruner: Pruner | None = None) -> jax.stages.Traced:
        arrays, plan = self._begin(pruner)
        return programs.run_prefill.trace(self._weights, self._backbone, *arrays, plan=plan)

    def _answer(self, rows: int) -> jax.stages.Traced:
        """Traces from pixels to the first token at an exact budget."""
        pruner, plan = self._choosing(Budget("count", self._kept))
        pairs = self._pairs(rows)._replace(pixels=self._pixels(rows), features=None)
        return programs.run_first_tokens.trace(
            self._weights,
            self._backbone,
            *(pruner, pairs, self._texts(rows), self._sampling),
            plan=dataclasses.replace(plan, slots=(self._slots(self._kept),), max_tokens=NEW_TOKENS),
        )

    def _decode(self, pruner: Pruner | None = None) -> jax.stages.Traced:
        arrays, plan = self._begin(pruner)
        prefill = functools.partial(programs.prefill, plan=dataclasses.replace(plan, mesh=None))
        arguments = (self._weights, *arrays)
        state, _ = jax.eval_shape(
            lambda params, *arrays: prefill(params, self._backbone, *arrays), *arguments
        )
        by_step = decodes_by_step(self._weights)
        return decoding.run_decode.trace(
            {"language": self._weights["language"]},
            self._model,
            self._place(state),
            self._sampling,
            None if by_step else self._place(_shape(())),
            execution=self._execution,
            mesh=self._mesh,
        )

    # Selection without a model.

    def _choose(self, function: Callable[..., PyTree], rows: int) -> jax.stages.Traced:
        """Traces a selection function over the encoder's memory."""
        config = self._setup.selector.config
        shape = (rows, self._tokens + 1, config.policy_width)
        memory = self._by_rows(_shape(shape, compute_dtype(config, self._dtype)))

        @functools.wraps(function)
        def run(params: PyTree, memory: PyTree) -> PyTree:
            return function(params, config, start_episode(params, config, memory))

        return jax.jit(run).trace(self._policy, memory)


def _shape(shape: tuple[int, ...], dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
