"""Measures the cost and savings of pruning from pixels to the first token, as a table.

    python -m stepprune_jax.efficiency --model llava-7b --dtype bfloat16 --json OUT.json
    python -m stepprune_jax.efficiency --model llava-7b --dry_run  # operations only, by formula

The table has one row per pruning method and budget. The baseline is the row that keeps all tokens.
Weights, images and prompts are random, on jax's default device. A measurement starts with pixels in
host memory and ends when the host has the first token. Compilation is excluded. Each row alternates
with the baseline, if present, so that drift of the machine affects both rows equally. The ratio of
two rows compares measurements of the same round. The command prints and writes each row after its
measurement. A row that fails, for example for lack of memory, is omitted, and the exit status is
then 1.

The column "kernels" counts kernels up to the first token, on GPUs only. The column "memory" is the
memory of the largest program without the weights. `--first_answer` also times the first answer in
two new processes. The second process finds the programs that the first process has compiled.

A policy with random weights would stop at an arbitrary number of tokens. To keep the requested
mean, the price of a token grows steeply with the number of kept tokens, and the stop bias is
calibrated on the images of the batch. The measurement therefore has the cost of selection, but not
the variation of the counts over images.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.cli.command_line import exit_with, file_to_write
from stepprune_jax.cli.flags.efficiency import NAME, parse
from stepprune_jax.efficiency import measure
from stepprune_jax.efficiency.measure import Bench, BenchInputs, BenchRow
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.efficiency.rows import (
    UNPRUNED,
    default_rows,
    random_policy,
    read_rows,
    with_square_images,
)
from stepprune_jax.efficiency.timing import environment, peak_memory, table
from stepprune_jax.efficiency.weights import random_weights
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.pipeline import place_pruner
from stepprune_jax.models import vlm
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.qwen2_5_vl.videos import MAX_CLIP_TOKENS
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import prepare_to_answer
from stepprune_jax.user_input import expect

# Flags that are saved with the results.
_SAVED_FLAGS = (
    "dtype",
    "weights",
    "policy_dtype",
    "decoder_layers",
    "frames",
    "text",
    "new_tokens",
    "rounds",
)


def _format_cells(measurement: dict[str, Any]) -> dict[str, object]:
    """Returns the table cells of one measured row, by their columns.

    Args:
        measurement: result of `measure.measure`.
    """
    milliseconds, speed_up = measurement["ms"], measurement["speed_up"]
    mean_kept, min_kept, max_kept = measurement["kept"]
    kept_range = f" ({min_kept} to {max_kept})" if min_kept < max_kept else ""
    median_milliseconds = {part: values[0] for part, values in milliseconds.items()}
    return {
        "row": measurement["row"],
        "tokens kept": f"{mean_kept:.4g}{kept_range}",
        "TFLOPs": sum(measurement["tflops"].values()),
        "tower, ms": median_milliseconds["tower"],
        "selection, ms": median_milliseconds["selector"],
        # The time to the first token without tower and selection.
        "prefill and host, ms": median_milliseconds["rest"],
        "to the first token, ms": _format_spread(milliseconds["whole"]),
        "ms a token": median_milliseconds["decode"],
        "kernels": "-" if measurement["kernels"] is None else measurement["kernels"],
        "memory, MB": measurement["working_bytes"] / 1e6,
        "cache, MB a row": measurement["cache_bytes"] / 1e6,
        "times unpruned": _format_spread(speed_up) if speed_up else "-",
        "compile, s": measurement["compile_s"],
    }


def _format_spread(values: Sequence[float]) -> str:
    """Formats a median, a minimum and a maximum as "median (minimum, maximum)"."""
    median, minimum, maximum = values
    return f"{median:.3g} ({minimum:.3g}, {maximum:.3g})"


def _read_flags(flags: argparse.Namespace) -> tuple[Backbone, list[BenchRow], RunOptions]:
    """Checks the flags, and builds the model and the rows without weights.

    Args:
        flags: result of `parse`.

    Returns:
        The model, the rows, and the options of its runs. Policies of rows have the shapes of their
        parameters only; `random_policy` adds the arrays.

    Raises:
        UserError: a flag is invalid, or the model does not support its value.
    """
    backbone = find_backbone(flags.model)
    if backbone.config.sizes_vary and not backbone.config.is_tiled:
        backbone = with_square_images(backbone, flags.tokens)
    config = backbone.config
    options = RunOptions(flags.new_tokens + 1, execution=Execution(attention=flags.attention))
    options.execution.check_backend()
    num_patches = count_patches(backbone, flags.frames)
    names = flags.rows or default_rows(config, num_patches)
    rows = read_rows(
        names, config, flags.decoder_layers, flags.policy_dtype, num_patches=num_patches
    )
    limit = config.text.max_positions
    expect("--new_tokens", flags.new_tokens, flags.new_tokens < limit, f"less than {limit}")
    num_visual = config.max_image_tokens * max(1, num_patches)
    max_kept = max(row.pruner.schedule(config, num_visual).bound for row in rows)
    max_text = backbone.CONTEXT_LIMIT - max_kept
    expected = f"at most {max_text}: the model's context also has the visual tokens of each row"
    expect("--text", flags.text, flags.text <= max_text, expected)
    return backbone, rows, options


def count_patches(backbone: Backbone, num_frames: int | None) -> int:
    """Returns the number of temporal patches of a video of `num_frames` frames; 0 for None.

    Raises:
        UserError: the model reads no videos, or the video has more tokens than a model may read.
    """
    if num_frames is None:
        return 0
    config = backbone.config
    expect("--frames", num_frames, backbone.reads_videos, "no value: this model reads images only")
    num_patches = -(-num_frames // config.vision.temporal_patch_size)
    max_patches = MAX_CLIP_TOKENS // config.max_image_tokens
    expected = f"at most {max_patches * config.vision.temporal_patch_size} of these --tokens"
    expect("--frames", num_frames, num_patches <= max_patches, expected)
    return num_patches


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the rows of the table, and writes their results; or only counts operations.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.

    Returns:
        The exit status: 1 if a row was omitted, otherwise 0.
    """
    flags = parse(arguments)
    backbone, rows, options = _read_flags(flags)
    config = backbone.config
    abstract_weights = vlm.abstract_params(backbone, flags.dtype, flags.weights)
    leaves = jax.tree.leaves(abstract_weights)
    weights_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if flags.dry_run:
        _print_operations(backbone, rows, flags.text, count_patches(backbone, flags.frames))
        print(f"weights in {flags.dtype}, {flags.weights}: {weights_bytes / 2**30:.2f} GiB")
        return 0
    json_file, failures, first_answers = file_to_write("--json", flags.json), {}, {}
    if flags.first_answer:  # Measured first, before this process allocates the device's memory.
        try:
            row_name = flags.rows[-1] if flags.rows else rows[-1].name
            first_answers = _measure_first_answers(flags, row_name)
        except subprocess.CalledProcessError as error:
            failures["first answer"] = str(error)
    start_time = time.perf_counter()
    model = VLM(prepare_to_answer(random_weights(abstract_weights)), backbone)
    rows = [random_policy(row) for row in rows]
    rows = [row._replace(pruner=place_pruner(model, row.pruner)) for row in rows]
    jax.block_until_ready(model.params)
    report = {
        "model": flags.model,
        "layers": config.text.num_layers,
        "width": config.text.hidden_size,
        "tokens": config.max_image_tokens,
        **{name: getattr(flags, name) for name in _SAVED_FLAGS},
        "weights_bytes": weights_bytes,
        "start_s": time.perf_counter() - start_time,
        "execution": str(options.execution),
        "environment": environment(),
        "batches": {},
        "first_answer": first_answers,
        "left_out": failures,
    }
    bench = Bench(model, options, flags.rounds)
    for batch_size in flags.batch:
        num_patches = count_patches(backbone, flags.frames)
        batch = measure.random_batch(backbone, batch_size, flags.text, num_patches)
        _measure_rows(bench, rows, batch, report, json_file)
    for process_kind, seconds in first_answers.items():
        phases = ", ".join(f"{phase} {value:.3g} s" for phase, value in seconds.items())
        print(f"first token of a process, {process_kind}: {phases}")
    print(f"wrote {json_file}")
    return int(bool(failures))


def _print_operations(
    backbone: Backbone, rows: Sequence[BenchRow], num_text_tokens: int, num_patches: int
) -> None:
    """Prints a table with the operations of each row by formula, for one prompt.

    Args:
        backbone: the model.
        rows: the rows.
        num_text_tokens: number of text tokens of the prompt.
        num_patches: number of temporal patches of its video; 0 for one image.
    """
    batch = measure.random_batch(backbone, 1, num_text_tokens, num_patches)
    tflops_by_row = {row.name: measure.count_tflops(backbone, row, batch) for row in rows}
    stages = tflops_by_row[rows[0].name]
    header = ["row", *(f"{stage}, TFLOPs" for stage in stages), "all"]
    cells = [
        [name, *tflops.values(), sum(tflops.values())] for name, tflops in tflops_by_row.items()
    ]
    print(table(header, cells))


def _measure_rows(
    bench: Bench,
    rows: Sequence[BenchRow],
    batch: BenchInputs,
    report: dict[str, Any],
    json_file: Path,
) -> None:
    """Measures the rows on one batch, and prints and saves each row after its measurement.

    Args:
        bench: the model and its options.
        rows: the rows; the baseline (`UNPRUNED`), if present, is first.
        batch: inputs of all rows.
        report: contents of `json_file`, extended by this function: "batches" gets the rows,
            "left_out" the errors of failed rows, and "peak_bytes" the peak memory.
        json_file: file that is written after each row.
    """
    batch_size, measurements, baseline = len(batch.prompts.length), [], None
    report["batches"][str(batch_size)] = measurements
    for row in tqdm(rows, desc=f"batch {batch_size}", unit="row"):
        row_baseline = row if row.name == UNPRUNED else baseline
        try:
            measurement = measure.measure(bench, row_baseline, row, batch)
        except Exception as error:
            reason = f"{type(error).__name__}: " + str(error).partition("\n")[0]
            tqdm.write(f"{row.name} is left out: {reason}", file=sys.stderr)
            report["left_out"][f"{row.name}, batch {batch_size}"] = reason
            if not isinstance(error, jax.errors.JaxRuntimeError):  # The error is a bug.
                traceback.print_exc()
        else:
            measurements.append(measurement)
            baseline = row_baseline  # Rows are not compared with a baseline that failed.
            cells = _format_cells(measurement)
            *header, line = table([*cells], [[*cells.values()]]).splitlines()
            is_first = len(measurements) == 1
            title = [f"batch {batch_size}", "", *header] if is_first else []
            tqdm.write("\n".join([*title, line]))
        report["peak_bytes"] = peak_memory()
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(flush=True)


def _measure_first_answers(flags: argparse.Namespace, row_name: str) -> dict[str, dict[str, float]]:
    """Times the first answer of two new processes that share a cache of compiled programs.

    The cache is empty at the start of the first process.

    Args:
        flags: flags of this command, which the processes get as well.
        row_name: name of the row to measure.

    Returns:
        For each process: the seconds until the model is ready, the further seconds until the first
        token, and the seconds of compiling for a complete answer.

    Raises:
        subprocess.CalledProcessError: a process failed.
    """
    seconds_by_process = {}
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        report_file = Path(folder, "result.json")
        copied_flags = ("model", "tokens", "attention", *_SAVED_FLAGS)
        values = {name: getattr(flags, name) for name in copied_flags}
        values = {name: value for name, value in values.items() if value is not None}
        values |= {"json": report_file, "rows": row_name, "batch": flags.batch[0], "rounds": 1}
        command_line = [sys.executable, "-m", "stepprune_jax.efficiency"]
        for name, value in values.items():
            command_line += [f"--{name}", str(value)]
        for process_kind in ("no programs kept", "programs of an earlier process"):
            subprocess.run(command_line, env=environ, check=True, stdout=subprocess.DEVNULL)
            report = json.loads(report_file.read_text(encoding="utf-8"))
            ((measurement,),) = report["batches"].values()  # One batch with one row.
            seconds_by_process[process_kind] = {
                "model ready after": report["start_s"],
                "first token after further": measurement["first_s"],
                "compiling for the whole answer": measurement["compile_s"],
            }
    return seconds_by_process


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
