"""Memory per device and operations of a training update, from compilation alone.

    python -m tools.bench.update --model llava-7b --mesh data=2 fsdp=8 --ids 640 1473

Nothing is allocated and no weights are needed: the update is compiled for virtual CPU devices, as
in `train.py --dry_run`. Frozen weights are bfloat16, the policy is float32 and as wide as the
tower; the frozen model processes one row at a time on each device and recomputes its blocks in the
backward pass.
"""

import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from stepprune_jax.command_line import Parser, exit_with, integer_from
from stepprune_jax.efficiency.model_shapes import MODELS, model_config
from stepprune_jax.flops import traced_flops
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.compiling import Usage
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.pruning import StepPrune
from stepprune_jax.training.batches import Bucket
from stepprune_jax.training.language_loss import ForwardOptions
from stepprune_jax.training.optimizer import OptimizerSettings
from stepprune_jax.training.plan import planned_memory, trace_update
from stepprune_jax.training.step import Setup
from stepprune_jax.user_input import user_input

# AdamW, as in the paper; neither memory nor operations depend on the numbers.
_OPTIMIZER = OptimizerSettings(
    lr=1e-3, final_lr=1e-4, warmup=40, weight_decay=1e-4, clip=1.0, b1=0.9, b2=0.999, muon_lr=0.0
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table: one line for each model, mesh and width, in GiB per device."""
    parser = Parser(prog="tools.bench.update", description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="name or config.json")
    parser.add_argument(
        "--mesh", nargs="+", default=["data=2", "fsdp=8"], help="sizes by axis, or single"
    )
    parser.add_argument(
        "--ids", nargs="+", type=integer_from(1), default=[640], help="widths; images are one"
    )
    parser.add_argument("--batch", type=integer_from(1), default=16)
    parser.add_argument(
        "--policy_text", type=integer_from(1), default=128, help="tokens the policy reads"
    )
    parser.add_argument("--targets", type=integer_from(1), default=256, help="supervised tokens")
    options = parser.parse_args(arguments)
    with user_input():
        configs = {name: model_config(name) for name in options.model}
        meshes = {sizes: _mesh(sizes) for sizes in options.mesh}
    print(f"batch {options.batch}, GiB per device, TFLOPs on all devices")
    columns = ("model", "mesh", "devices", "ids", *Usage._fields, "TFLOPs")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, config in configs.items():
        for sizes, mesh in meshes.items():
            policy = PolicyConfig(
                feature_width=config.vision.hidden_size, text_width=config.text.hidden_size
            )
            setup = Setup(
                config,
                StepPrune(config=policy),
                steps=1000,
                optimizer=_OPTIMIZER,
                text_gate_anneal=0.1,
                forward=ForwardOptions(Execution(remat=True), row_count(mesh), mesh),
            )
            for ids in options.ids:
                bucket = Bucket(ids, options.policy_text, options.targets)
                with user_input():
                    traced = trace_update(setup, jnp.bfloat16, options.batch, bucket)
                row = [f"{size / 2**30:.2f}" for size in planned_memory(traced)]
                row.append(f"{traced_flops(traced.jaxpr) / 1e12:.1f}")
                print(
                    "| " + " | ".join([name, sizes, str(mesh.size), str(ids), *row]) + " |",
                    flush=True,
                )


def _mesh(sizes: str) -> Mesh:
    """Builds a mesh of as many devices as its sizes need, by default of one."""
    needed = math.prod(int(size) for size in re.findall(r"=\s*(\d+)", sizes))
    return build_mesh(sizes, jax.devices()[:needed])


if __name__ == "__main__":
    # Before jax is asked for devices.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    exit_with("tools.bench.update", main)
