"""Measures time, utilization and memory of the updates of `train.py`, and of its dry run.

Weights, images and conversations are random. If the batch does not fit into the device's memory, it
is halved.
"""

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from stepprune_jax.checkpoints import load
from stepprune_jax.cli.command_line import add_config, exit_with, read_config
from stepprune_jax.efficiency.model_shapes import MODELS
from stepprune_jax.efficiency.timing import peak_memory
from stepprune_jax.efficiency.weights import random_weights
from stepprune_jax.parallel.accelerators import ACCELERATORS, known_as
from stepprune_jax.training import Run, train
from stepprune_jax.training.dry_run import abstract_weights, dry_run
from stepprune_jax.training.step_config import make_mesh, make_step_config
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir.metrics import METRICS, read_rows
from tools.bench.training import replace_data
from tools.card import figures


def measure(out: Path, run: Run, workdir: Path) -> None:
    """Measures the dry run and the updates of a run.

    Args:
        out: file for the measurements.
        run: configuration of the run.
        workdir: folder of the run.
    """
    name, label = known_as(jax.devices()[0].device_kind), f"batch {run.batch_size}"
    plan = dry_run(run, workdir)
    plan_numbers = {"planned_gib": plan.memory.total / 2**30, "tflops": plan.flops / 1e12}
    figures.add(out, f"{label}, dry run", **plan_numbers, assumed_share=run.accelerator.utilisation)
    setup = make_step_config(run, run.model.inspect().backbone, make_mesh(run))
    weights = abstract_weights(setup, jnp.dtype(run.model.dtype))
    load.load_params = lambda *_, **__: random_weights(weights)
    train(run, workdir)
    last_row, peak_bytes = read_rows(workdir / METRICS)[-1], peak_memory()
    seconds = run.batch_size / last_row["images_per_s"]
    measured = {"updates": last_row["step"], "update_s": seconds}
    measured |= {} if peak_bytes is None else {"peak_gib": peak_bytes / 2**30}
    if name is not None:
        measured["share_of_peak"] = plan.flops / seconds / plan.devices / ACCELERATORS[name].flops
    figures.add(out, label, **measured)


def main() -> None:
    """Runs the command."""
    parser = figures.parser(__doc__)
    add_config(parser)
    flags, run = read_config(parser, None, Run)
    fields, ids = MODELS.get(flags.model), run.accelerator.ids
    fields = fields or json.loads(Path(flags.model).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        run = replace_data(run, fields, ids, Path(folder), run.steps * run.batch_size)
        while True:
            try:
                return measure(flags.out, run, Path(folder) / f"batch{run.batch_size}")
            except UserError as error:  # Raised by `memory_advice`.
                if "out of device memory" not in str(error) or run.batch_size == 1:
                    raise
                figures.add(flags.out, f"batch {run.batch_size}", none=str(error)[:200])
                run = run.replace({"batch_size": run.batch_size // 2})


if __name__ == "__main__":
    exit_with("tools.card.updates", main)
