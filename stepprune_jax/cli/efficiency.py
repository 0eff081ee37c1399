"""Cost and savings of pruning from pixels to the first token: the paper's efficiency table.

    python -m stepprune_jax.efficiency --model llava-7b --dtype bfloat16 --json OUT.json
    python -m stepprune_jax.efficiency --model llava-7b --dry_run  # operations alone, by formula

Weights, images and prompts are random, on jax's default device. Each row takes turns with that of
all tokens, if it is among them, so that drift of the machine affects both equally; ratios are
computed within a turn; compilation is excluded. A measurement starts with pixels in host memory and
ends when the first token is known. Each row is printed and written as it ends; one that fails, as
for lack of memory, is left out, costs no other, and makes the exit status 1.

"kernels" are those to the first token, on GPUs; "memory" is that of the largest program besides the
weights. `--first_answer` also times the first answer of two fresh processes, the second of which
finds the programs that the first has compiled.

Random weights stop anywhere. For a learned stop to keep the requested mean, the price of a token
grows steeply with their number, and the bias is calibrated on the images of the batch, as on
validation questions after training. This measures the cost of deciding, not how much the counts of
different images vary.
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
from typing import Any, NoReturn

import jax
from tqdm import tqdm

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.cli.command_line import Parser, exit_with, file_to_write, integer_from
from stepprune_jax.efficiency import measure
from stepprune_jax.efficiency.measure import Bench, BenchRow
from stepprune_jax.efficiency.model_shapes import KNOWN, find_backbone
from stepprune_jax.efficiency.rows import (
    UNPRUNED,
    default_rows,
    draw_learned,
    read_rows,
    with_square_images,
)
from stepprune_jax.efficiency.timing import environment, peak_memory, table
from stepprune_jax.efficiency.weights import random_weights
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.pipeline import place_pruner
from stepprune_jax.models import vlm
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.int8 import WEIGHTS
from stepprune_jax.models.stack import ATTENTIONS, Execution
from stepprune_jax.parallel.placement import prepare_to_answer
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.user_input import expect

_HEADER = [
    "row",
    "tokens kept",
    "TFLOPs",
    "tower, ms",
    "choosing, ms",
    "the rest, ms",
    "to the first token, ms",
    "ms a token",
    "kernels",
    "memory, MB",
    "cache, MB a row",
    "times unpruned",
    "compile, s",
]

_NAME = "stepprune-efficiency"
# Flags that are kept with the results.
_SETTINGS = ("dtype", "weights", "policy_dtype", "decoder_layers", "text", "new_tokens", "rounds")

# Parts of an answer whose medians are shown: "rest" is the time to the first token but for the
# first two, the language model's prefill and what the host does.
_PARTS = ("tower", "selector", "rest", "decode")


def _cells(row: dict[str, Any]) -> list[object]:
    """Returns the cells of a row; brackets have the minimum and the maximum over the rounds."""
    mean, least, most = row["kept"]
    whole = row["ms"]["whole"]
    tower, selector, rest, decode = (row["ms"][name][0] for name in _PARTS)
    return [
        row["row"],
        f"{mean:.4g}" + (f" ({least} to {most})" if least < most else ""),
        sum(row["tflops"].values()),
        tower,
        selector,
        rest,
        _spread(whole),
        decode,
        "-" if row["kernels"] is None else row["kernels"],
        row["working_bytes"] / 1e6,
        row["cache_bytes"] / 1e6,
        _spread(row["speed_up"]) if row["speed_up"] else "-",
        row["compile_s"],
    ]


def _spread(values: Sequence[float]) -> str:
    median, least, most = values
    return f"{median:.3g} ({least:.3g}, {most:.3g})"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = Parser(prog=_NAME, description=__doc__.split("\n")[0])
    known = ", ".join(KNOWN)
    parser.add_argument("--model", default="mid", help=f"{known}, or a config.json")
    parser.add_argument(
        "--tokens",
        type=integer_from(1),
        default=576,
        help="visual tokens of an image, for Qwen2.5-VL and Qwen3-VL",
    )
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--dry_run", action="store_true", help="count operations, run nothing")
    text = "such as all cls@64 'stepprune@64 group=4'; default: every pruner"
    parser.add_argument("--rows", nargs="+", help=text)
    parser.add_argument("--batch", type=integer_from(1), nargs="+", default=[1, 8])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    text = "int8: the language model's matrices"
    parser.add_argument("--weights", choices=WEIGHTS, default="full", help=text)
    parser.add_argument("--policy_dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--decoder_layers", type=integer_from(1), default=PolicyConfig().decoder_layers
    )
    parser.add_argument(
        "--text", type=integer_from(1), default=64, help="tokens of a prompt besides its image"
    )
    parser.add_argument(
        "--new_tokens", type=integer_from(1), default=16, help="tokens after the first"
    )
    parser.add_argument("--attention", choices=ATTENTIONS, default=Execution().attention)
    parser.add_argument("--rounds", type=integer_from(1), default=5, help="turns of every row")
    text = "also time the last row in two fresh processes, before and after programs are kept"
    parser.add_argument("--first_answer", action="store_true", help=text)
    flags = parser.parse_args(arguments)
    if not (flags.json or flags.dry_run):
        parser.error("the following arguments are required: --json, or --dry_run")
    return flags


def _read(flags: argparse.Namespace) -> tuple[Backbone, list[BenchRow], RunOptions]:
    """Returns model and rows without weights, and how they are run, once all flags are checked."""
    backbone = find_backbone(flags.model)
    if backbone.config.sizes_vary and not backbone.config.is_tiled:
        backbone = with_square_images(backbone, flags.tokens)
    config = backbone.config
    options = RunOptions(flags.new_tokens + 1, execution=Execution(attention=flags.attention))
    options.execution.check_backend()
    names = flags.rows or default_rows(config)
    rows = read_rows(names, config, flags.decoder_layers, flags.policy_dtype)
    longest = config.text.max_positions
    expect("--new_tokens", flags.new_tokens, flags.new_tokens < longest, f"less than {longest}")
    n = config.max_image_tokens
    room = backbone.CONTEXT_LIMIT - max(row.pruner.schedule(config, n).bound for row in rows)
    expected = f"at most {room}, which the rows leave of the model's context"
    expect("--text", flags.text, flags.text <= room, expected)
    return backbone, rows, options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 1 if a row is left out."""
    flags = parse(arguments)
    backbone, rows, options = _read(flags)
    config = backbone.config
    weights = vlm.abstract_params(backbone, flags.dtype, flags.weights)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    if flags.dry_run:
        batch = measure.draw_batch(backbone, 1, flags.text)
        counts = {x.name: measure.count_tflops(backbone, x, batch) for x in rows}
        cells = [[name, *parts.values(), sum(parts.values())] for name, parts in counts.items()]
        parts = counts[rows[0].name]
        print(table(["row", *(f"{part}, TFLOPs" for part in parts), "all"], cells))
        print(f"weights in {flags.dtype}, {flags.weights}: {held / 2**30:.2f} GiB")
        return 0
    out, left_out = file_to_write("--json", flags.json), {}
    first = {}
    if flags.first_answer:  # before this process holds memory of the device
        try:
            first = _first_answers(flags, (flags.rows or [row.name for row in rows])[-1])
        except subprocess.CalledProcessError as error:
            left_out["first answer"] = str(error)
    begun = time.perf_counter()
    model = VLM(prepare_to_answer(random_weights(weights)), backbone)
    rows = [draw_learned(row) for row in rows]
    rows = [row._replace(pruner=place_pruner(model, row.pruner)) for row in rows]
    jax.block_until_ready(model.params)
    bench = Bench(model, options, flags.rounds)
    result = {
        "model": flags.model,
        "layers": config.text.num_layers,
        "width": config.text.hidden_size,
        "tokens": config.max_image_tokens,
        **{name: getattr(flags, name) for name in _SETTINGS},
        "weights_bytes": held,
        "start_s": time.perf_counter() - begun,
        "execution": str(options.execution),
        "environment": environment(),
        "batches": {},
        "first_answer": first,
        "left_out": left_out,
    }
    for size in flags.batch:
        batch, measured, base = measure.draw_batch(backbone, size, flags.text), [], None
        result["batches"][str(size)] = measured
        for row in tqdm(rows, desc=f"batch {size}", unit="row"):
            beside = row if row.name == UNPRUNED else base
            try:
                measured.append(measure.measure(bench, beside, row, batch))
            except Exception as error:
                reason = f"{type(error).__name__}: " + str(error).partition("\n")[0]
                tqdm.write(f"{row.name} is left out: {reason}", file=sys.stderr)
                left_out[f"{row.name}, batch {size}"] = reason
                if not isinstance(error, jax.errors.JaxRuntimeError):  # no fault of the device
                    traceback.print_exc()
            else:
                base = beside
                lines = table(_HEADER, [_cells(measured[-1])]).splitlines()
                title = [f"batch {size}", "", *lines[:2]] if len(measured) == 1 else []
                tqdm.write("\n".join([*title, lines[2]]))
            result["peak_bytes"] = peak_memory()
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(flush=True)
    for kind, seconds in first.items():
        print(f"first token of a process, {kind}: {_said(seconds)}")
    print(f"wrote {out}")
    return int(bool(left_out))


def _said(seconds: dict[str, float]) -> str:
    return ", ".join(f"{part} {value:.3g} s" for part, value in seconds.items())


def _first_answers(flags: argparse.Namespace, row: str) -> dict[str, dict[str, float]]:
    """Answers in two fresh processes with one folder of compiled programs, which is empty first.

    Returns the seconds of both: before the model is ready, to the first token after that, and of
    compiling for the whole answer.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        own = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_ENABLE_COMPILATION_CACHE": "true"}
        own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        path = Path(folder, "result.json")
        given = {
            name: getattr(flags, name) for name in ("model", "tokens", "attention", *_SETTINGS)
        }
        command = [sys.executable, "-m", "stepprune_jax.efficiency", "--json", str(path)]
        for name, value in (given | {"rows": row, "batch": flags.batch[0], "rounds": 1}).items():
            command += [f"--{name}", str(value)]
        for kind in ("no programs kept", "programs of an earlier process"):
            subprocess.run(command, env=os.environ | own, check=True, stdout=subprocess.DEVNULL)
            result = json.loads(path.read_text(encoding="utf-8"))
            ((measured,),) = result["batches"].values()
            found[kind] = {
                "model ready after": result["start_s"],
                "first token after further": measured["first_s"],
                "compiling for the whole answer": measured["compile_s"],
            }
    return found


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
