"""Reads the memory per device of a model's programs from the compiler.

    python -m tools.bench.memory --model llava-7b --mesh single data tensor data_tensor

The command compiles the programs for virtual CPU devices. It needs no weights and allocates no
arrays.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.efficiency.model_shapes import MODELS, find_backbone
from stepprune_jax.models import vlm
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.decoder import Cache
from stepprune_jax.models.sequence import from_embeddings
from stepprune_jax.parallel.compiling import OPTIONS, Usage, usage
from stepprune_jax.parallel.sharding import BATCH, BATCH_RULES, PRESETS, build_mesh, shardings

CACHE_RULES = (("key|value", P(None, BATCH, "tensor")), ("length|next_position", P(BATCH)))


def compiled_programs(
    backbone: Backbone,
    mesh: Mesh,
    batch: int,
    length: int,
    max_new_tokens: int,
    programs: Iterable[str] = ("encode", "prefill", "decode"),
    dtype: Any = jnp.bfloat16,
) -> dict[str, Any]:
    """Compiles the programs of a model for a mesh, from shapes without arrays."""
    config, text = backbone.config, backbone.config.text
    slots = (text.num_layers, batch, text.num_kv_heads, length + max_new_tokens, text.head_dim)
    shape = jax.ShapeDtypeStruct
    row = shape((batch,), jnp.int32)
    hidden = shape((batch, length, text.hidden_size), dtype)
    sequence = jax.eval_shape(functools.partial(from_embeddings, config), hidden, row)
    cache = Cache(shape(slots, dtype), shape(slots, dtype), row, row)
    pixels = backbone.largest_pixel_shapes(batch)

    def encode(params, pixels):
        features, _ = backbone.encode_image(params, pixels)
        return backbone.project(params, features)

    def prefill(params, sequence):
        return vlm.prefill(params, config, sequence, max_new_tokens)

    def decode(params, cache, token):
        return vlm.decode_step(params, config, token, cache)

    params = vlm.abstract_params(backbone, dtype)
    param_shardings = shardings(params, backbone.SHARDING_RULES, mesh)
    cache_shardings = shardings(cache, CACHE_RULES, mesh)
    inputs = {"encode": (pixels,), "prefill": (sequence,), "decode": (cache, row)}
    input_shardings = {
        "encode": shardings((pixels,), BATCH_RULES, mesh),
        "prefill": shardings((sequence,), BATCH_RULES, mesh),
        "decode": (cache_shardings, shardings(row, BATCH_RULES, mesh)),
    }
    functions = {
        "encode": (encode, None),
        "prefill": (prefill, vlm.Prefill(None, cache_shardings)),
        "decode": (decode, (None, cache_shardings)),
    }
    options = OPTIONS.get(jax.default_backend())
    compiled = {}
    for name in programs:
        function, out_shardings = functions[name]
        jitted = jax.jit(
            function,
            in_shardings=(param_shardings, *input_shardings[name]),
            out_shardings=out_shardings,
            donate_argnums=1 if name == "decode" else (),
        )
        lowered = jitted.lower(params, *inputs[name])
        compiled[name] = lowered.compile(compiler_options=options)
    return compiled


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command: prints a row for each model, mesh and program, in GiB per device."""
    parser = Parser(prog="tools.bench.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="name or config.json")
    parser.add_argument(
        "--mesh", nargs="+", default=["single", "data", "tensor", "data_tensor"], choices=PRESETS
    )
    parser.add_argument("--batch", type=integer_from(1), default=4)
    parser.add_argument(
        "--length", type=integer_from(1), default=640, help="tokens after expansion"
    )
    parser.add_argument("--max_new_tokens", type=integer_from(1), default=64)
    flags = parser.parse_args(arguments)
    backbones = {name: find_backbone(name) for name in flags.model}
    print(
        f"batch {flags.batch}, {flags.length} + {flags.max_new_tokens} tokens, bfloat16, "
        "GiB per device"
    )
    columns = ("model", "mesh", "devices", "program", *Usage._fields)
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, backbone in backbones.items():
        for preset in flags.mesh:
            devices = {"single": 1}.get(preset, 4 if "_" in preset else 2)
            mesh = build_mesh(preset, jax.devices()[:devices])
            sizes = flags.batch, flags.length, flags.max_new_tokens
            compiled = compiled_programs(backbone, mesh, *sizes)
            for program, executable in compiled.items():
                sizes = " | ".join(f"{size / 2**30:.2f}" for size in usage(executable))
                print(f"| {name} | {preset} | {devices} | {program} | {sizes} |", flush=True)


if __name__ == "__main__":
    # Set before jax looks for devices.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    exit_with("tools.bench.memory", main)
