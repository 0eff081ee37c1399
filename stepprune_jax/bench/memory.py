"""Memory per device of a backbone's programs, from compilation alone.

    python -m stepprune_jax.bench.memory --model llava-7b --mesh single data tensor data_tensor

Nothing is allocated and no weights are needed: the programs are compiled for virtual CPU devices.
"""

import functools
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from stepprune_jax.command_line import Parser, exit_with, integer_from
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models import vlm
from stepprune_jax.models.decoder import Cache
from stepprune_jax.models.family import ModelConfig, find_family
from stepprune_jax.parallel.compiling import OPTIONS, Usage, usage
from stepprune_jax.parallel.sharding import (
    BATCH_RULES,
    CACHE_RULES,
    PRESETS,
    build_mesh,
    shardings,
)
from stepprune_jax.user_input import user_input

_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_TEXT = {"vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_WIDE = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}

# The language model has some fifteen times the operations of the tower at 640 tokens, where that of
# LLaVA-7B has twenty; 576 tokens an image as there, and 1.6 GB in float32.
_SMALL_VISION = _VISION | {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
}
_SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}

MODELS = {
    "llava-7b": {"model_type": "llava", "vision_config": _VISION, "text_config": _TEXT},
    "llava-13b": {"model_type": "llava", "vision_config": _VISION, "text_config": _TEXT | _WIDE},
    "mid": {"model_type": "llava", "vision_config": _SMALL_VISION, "text_config": _TEXT | _SMALL},
}
_QWEN_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
}
_QWEN = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": _QWEN_VISION,
    "vocab_size": 152064,
}
_QWEN_SMALL = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vision_config": _QWEN_VISION | {"out_hidden_size": 2048},
    "vocab_size": 151936,
}
_QWEN_LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vision_config": _QWEN_VISION | {"intermediate_size": 3456, "out_hidden_size": 8192},
}
# The text part of "mid" with grouped key heads, and a tower of its widths.
_QWEN_MID = {
    **{key: value for key, value in _SMALL.items() if key != "num_attention_heads"},
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vision_config": _QWEN_VISION
    | {"depth": 12, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6}
    | {"fullatt_block_indexes": [2, 5, 8, 11], "out_hidden_size": 1024},
    "vocab_size": 32064,
    "image_token_id": 32063,
}
QWEN_MODELS = {
    "qwen-mid": _QWEN | _QWEN_MID,
    "qwen2.5-vl-7b": _QWEN,
    "qwen2.5-vl-3b": _QWEN | _QWEN_SMALL,
    "qwen2.5-vl-72b": _QWEN | _QWEN_LARGE,
}


def compiled_programs(
    config: ModelConfig,
    mesh: Mesh,
    batch: int,
    length: int,
    max_new_tokens: int,
    programs: Iterable[str] = ("encode", "prefill", "decode"),
    dtype: Any = jnp.bfloat16,
) -> dict[str, Any]:
    """Compiles the backbone's programs for a mesh from shapes only.

    Args:
        config: the model's shape, including the image size.
        mesh: result of `build_mesh`.
        batch: rows, one image each; divisible by the mesh's "data" and "fsdp" axes.
        length: tokens of the assembled sequence.
        max_new_tokens: additional slots of the cache.
        programs: which of "encode" (tower and projector), "prefill", "decode" (cache donated).
        dtype: dtype of weights and cache.

    Returns:
        `jax.stages.Compiled` by program.

    Raises:
        ValueError: a sharded dimension that the mesh does not divide.
    """
    text = config.text
    slots = (text.num_layers, batch, text.num_kv_heads, length + max_new_tokens, text.head_dim)
    shape = jax.ShapeDtypeStruct
    row = shape((batch,), jnp.int32)
    hidden = shape((batch, length, text.hidden_size), dtype)
    sequence = jax.eval_shape(functools.partial(vlm.from_embeddings, config), hidden, row)
    cache = Cache(shape(slots, dtype), shape(slots, dtype), row, row)
    pixels = config.family.max_pixels(config, batch)

    def encode(params, pixels):
        return vlm.project(params, config, vlm.encode_image(params, config, pixels)[0])

    def prefill(params, sequence):
        return vlm.prefill(params, config, sequence, max_new_tokens)

    def decode(params, cache, token):
        return vlm.decode_step(params, config, token, cache)

    params = vlm.abstract_params(config, dtype)
    placed = shardings(params, config.family.SHARDING_RULES, mesh)
    cache_at = shardings(cache, CACHE_RULES, mesh)
    inputs = {"encode": (pixels,), "prefill": (sequence,), "decode": (cache, row)}
    inputs_at = {
        "encode": shardings((pixels,), BATCH_RULES, mesh),
        "prefill": shardings((sequence,), BATCH_RULES, mesh),
        "decode": (cache_at, shardings(row, BATCH_RULES, mesh)),
    }
    functions = {
        "encode": (encode, None),
        "prefill": (prefill, vlm.Prefill(None, cache_at)),
        "decode": (decode, (None, cache_at)),
    }
    options = OPTIONS.get(jax.default_backend())
    compiled = {}
    for name in programs:
        function, out_shardings = functions[name]
        jitted = jax.jit(
            function,
            in_shardings=(placed, *inputs_at[name]),
            out_shardings=out_shardings,
            donate_argnums=1 if name == "decode" else (),
        )
        lowered = jitted.lower(params, *inputs[name])
        compiled[name] = lowered.compile(compiler_options=options)
    return compiled


def model_config(name: str) -> ModelConfig:
    """Returns the config of a known model, or of a folder or file in the Hugging Face layout.

    Raises:
        ValueError: it is none of these, or a field is not supported; the message names the file.
    """
    known = MODELS | QWEN_MODELS
    if name in known:
        return find_family(known[name]).read_config(known[name], None)
    path = pathlib.Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--model {name!r} is neither a file nor one of {', '.join(known)}")
    raw = read_json_object(path)
    family = find_family(raw)
    if family is None:
        raise ValueError(f"--model {name!r}: model_type {raw.get('model_type')!r} is not supported")
    try:
        return family.read_config(raw, None)
    except ValueError as error:
        raise ValueError(f"--model {name!r}: {error}") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table: one line for each model, mesh and program, in GiB per device."""
    parser = Parser(prog="stepprune_jax.bench.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="name or config.json")
    parser.add_argument(
        "--mesh", nargs="+", default=["single", "data", "tensor", "data_tensor"], choices=PRESETS
    )
    parser.add_argument("--batch", type=integer_from(1), default=4)
    parser.add_argument(
        "--length", type=integer_from(1), default=640, help="tokens after expansion"
    )
    parser.add_argument("--max_new_tokens", type=integer_from(1), default=64)
    options = parser.parse_args(arguments)
    with user_input():
        configs = {name: model_config(name) for name in options.model}
    print(
        f"batch {options.batch}, {options.length} + {options.max_new_tokens} tokens, bfloat16, "
        "GiB per device"
    )
    columns = ("model", "mesh", "devices", "program", *Usage._fields)
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, config in configs.items():
        for preset in options.mesh:
            devices = {"single": 1}.get(preset, 4 if "_" in preset else 2)
            mesh = build_mesh(preset, jax.devices()[:devices])
            sizes = options.batch, options.length, options.max_new_tokens
            with user_input():
                compiled = compiled_programs(config, mesh, *sizes)
            for program, executable in compiled.items():
                sizes = " | ".join(f"{size / 2**30:.2f}" for size in usage(executable))
                print(f"| {name} | {preset} | {devices} | {program} | {sizes} |", flush=True)


if __name__ == "__main__":
    # Before jax is asked for devices.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    exit_with("stepprune_jax.bench.memory", main)
