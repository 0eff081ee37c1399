"""Compiles a run's programs for GPUs and TPUs that this machine lacks, and prints a table.

    python -m tools.aot                    # small shapes: minutes
    python -m tools.aot --full             # LLaVA-7B, every ablation and target: hours
    python -m tools.aot --target a6000:2 --config configs/llava7b.py --program update
    python -m tools.aot --target h200 --config shapes --set batch_size=64 --program update

Without flags, the command compiles a selection of targets, configurations and programs. With flags,
it compiles all their combinations. The exit status is 1 if a program failed to compile. With
`--results FILE`, the command saves each result at once; after an interruption, the same command
continues and recompiles only changed programs. The column "kernels" has the kernels of one
iteration of each loop, and the kernels of a run with one iteration of each loop of unknown length,
and with two. StepPrune's loop selects 16 tokens per iteration.
"""

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from stepprune_jax import configurations
from stepprune_jax.cli.command_line import Parser, exit_with
from stepprune_jax.efficiency.kernels import count_kernels
from stepprune_jax.parallel.accelerators import ACCELERATORS, known_as
from stepprune_jax.parallel.aot_targets import Target, make_target
from stepprune_jax.parallel.compiling import usage
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.user_input import UserError
from tools.aot.hlo import loops
from tools.aot.programs import DTYPES, ROWS, Programs

NAME = "python -m tools.aot"
COLUMNS = (
    "target",
    "devices",
    "configuration",
    "dtype",
    "program",
    "GiB a device",
    "kernels in loops; in all",
    "CPU seconds",
    "result",
)

SHAPES, LLAVA = "configs/shapes.py", "configs/llava7b.py"
TILED = "configs/llava_next_7b.py"  # Images have up to 2,928 tokens.
SAMPLED = "configs/rloo.py"  # Training by RLOO on sampled subsets.
TARGETS = ("h200", "a100", "a6000:2", "v5e", "v5e:2x4", "v6e")
# Programs that change with the score aggregation, and programs that change with the selector. All
# further programs equal the programs of `configs/shapes.py`.
LEARNING = ("update",)
CHOOSING = ("update", "rank", *(f"{name} {rows}" for name in ("select", "answer") for rows in ROWS))
PICKS = ("policy.pick 1", "policy.pick 2", "policy.pick 8")
# Programs that have failed on some target, and similar programs.
CRITICAL = (*PICKS, "prefill cut")


class Group(NamedTuple):
    """Combinations to compile.

    Attributes:
        targets: names of targets.
        configs: names or files of configurations.
        dtypes: keys of `DTYPES`.
        programs: names of programs; empty compiles all programs of a configuration.
        changes: changes to each configuration, "field=value".
    """

    targets: Sequence[str]
    configs: Sequence[str]
    dtypes: Sequence[str]
    programs: Sequence[str] = ()
    changes: Sequence[str] = ()


SHORT = (
    Group(("h200", "v5e"), (SHAPES,), ("float32",)),
    Group(("h200", "v5e"), (f"{SAMPLED}:shapes",), ("float32",), LEARNING),
    Group(("h200", "v5e"), (SHAPES,), ("bfloat16",), CRITICAL),
    Group(("a100", "a6000:2", "v5e:2x4", "v6e"), (SHAPES,), ("float32",), CRITICAL),
)
FULL = (
    Group(TARGETS, (SHAPES, f"{SHAPES}:literal"), ("float32", "bfloat16")),
    *(
        Group(TARGETS, (SHAPES,), ("float32",), LEARNING, (f"policy.aggregation={name}",))
        for name in ("alive", "last", "uniform")
    ),
    *(
        Group(TARGETS, (SHAPES,), ("float32",), CHOOSING, (change,))
        for change in ("method=autoselect", "policy.encoder_attention=causal")
    ),
    Group(TARGETS, (f"{SAMPLED}:shapes", f"{SAMPLED}:llava7b"), ("mixed",), LEARNING),
    Group(TARGETS, (LLAVA,), ("mixed", "bfloat16")),
    Group(TARGETS, (TILED,), ("mixed",), (*LEARNING, "tower", "answer 1")),
    Group(TARGETS, (f"{LLAVA}:literal",), ("mixed", "bfloat16"), (*CHOOSING, *PICKS)),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags, and adds the groups that they request."""
    parser = Parser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="7B shapes, every ablation and target")
    parser.add_argument("--target", nargs="+", help="such as h200, a6000:2, v5e:2x4")
    parser.add_argument("--config", nargs="+", help="names or files, such as shapes:literal")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="dtype of model and policy")
    parser.add_argument("--program", nargs="+", help="such as update, or 'select own 8'")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="changes to the configurations"
    )
    parser.add_argument("--results", type=Path, help="file that saves results as JSON lines")
    flags = parser.parse_args(arguments)
    has_flags = flags.target or flags.config or flags.dtype or flags.program or flags.set
    if flags.full and has_flags:
        parser.error("--full compiles a fixed list of programs, expected no other selection")
    flag_group = Group(
        flags.target or ("h200", "v5e"),
        flags.config or (SHAPES,),
        flags.dtype or ("float32",),
        flags.program or (),
        flags.set,
    )
    flags.groups = FULL if flags.full else (flag_group,) if has_flags else SHORT
    return flags


def compile_row(device_memory: float | int, target: Target, lowered: Any) -> tuple[list[str], bool]:
    """Compiles a program.

    Args:
        device_memory: bytes of memory of a device.
        target: the target.
        lowered: the lowered program.

    Returns:
        The cells of the result, and whether the program compiled.
    """
    start_time = time.process_time()  # Of all threads. Wall time would depend on the load.
    try:
        compiled = target.compile(lowered)
    except jax.errors.JaxRuntimeError as error:
        seconds, message = f"{time.process_time() - start_time:.1f}", " ".join(str(error).split())
        if message.startswith("RESOURCE_EXHAUSTED"):
            return ["-", "-", seconds, "does not fit"], True
        return ["-", "-", seconds, "FAILED: " + message[:300].replace("|", "/")], False
    seconds, memory = time.process_time() - start_time, usage(compiled).total
    text = compiled.as_text()
    kernels = " ".join(str(loop.kernels) for loop in loops(text)) or "-"
    kernels += f"; {count_kernels(text)}, {count_kernels(text, 2)}"
    result = "ok" if memory <= device_memory else "does not fit"
    return [f"{memory / 2**30:.3f}", kernels, f"{seconds:.1f}", result], True


class Results(dict[str, list[str]]):
    """Rows of the table by a digest of target, program and compiler.

    Configurations share programs, such as the tower. Each program is compiled once per target.
    """

    def __init__(self, path: Path | None):
        """Reads the results of earlier runs from a file; None keeps results in memory."""
        super().__init__()
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                digest, *cells = json.loads(line)
                self[digest] = list(map(str, cells))
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"{path}, line {number}: expected a JSON list of texts: {error}"
                ) from error

    def add(self, digest: str, cells: list[str]) -> None:
        """Adds the row of a program, and appends it to the file."""
        self[digest] = cells
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([digest, *cells]) + "\n")


def rows(group: Group, results: Results) -> Iterator[tuple[list[str], bool]]:
    """Compiles a group. Yields the row of each program, and whether the program compiled."""
    for name, config, dtype in itertools.product(group.targets, group.configs, group.dtypes):
        target = make_target(name)
        kind = target.devices[0].device_kind
        # A TPU has less memory than a GPU, so the frozen weights are sharded there.
        preset = "fsdp" if kind.startswith("TPU") else "data"
        run = configurations.load(config, group.changes)
        programs = Programs(run, build_mesh(preset, target.devices), dtype)
        names = programs.names()
        unknown = sorted(set(group.programs) - set(names))
        if unknown:
            raise UserError(f"{config} has no program {unknown[0]!r}, it has {', '.join(names)}")
        for program in group.programs or names:
            settings = " ".join((config, *group.changes))
            columns = [name, str(len(target.devices)), settings, dtype, program]
            lowered = programs.trace(program).lower()
            text = f"{name} {jax.__version__} {lowered.as_text()}"
            digest = hashlib.sha256(text.encode()).hexdigest()
            saved = results.get(digest)
            if saved is None:
                cells, compiled = compile_row(ACCELERATORS[known_as(kind)].memory, target, lowered)
                if compiled:
                    results.add(digest, [*columns, *cells])
                yield [*columns, *cells], compiled
            elif saved[:5] == columns:
                yield saved, True
            else:
                yield [*columns, *saved[5:7], "0", f"{saved[-1]} (as {saved[2]}, {saved[3]})"], True
        _release_memory()


def _release_memory() -> None:
    """Returns freed memory to the system. Otherwise, glibc would keep many GiB of compilers."""
    jax.clear_caches()
    with contextlib.suppress(OSError, AttributeError):  # The system has another C library.
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a program failed to compile, and 0 otherwise."""
    flags = parse(arguments)
    results = Results(flags.results)
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    num_failed = 0
    for group in flags.groups:
        for row, compiled in rows(group, results):
            print("| " + " | ".join(row) + " |", flush=True)
            num_failed += not compiled
    if num_failed:
        print(f"{NAME}: {num_failed} program(s) failed to compile", file=sys.stderr)
    return min(num_failed, 1)


if __name__ == "__main__":
    # Set before jax looks for devices, because the targets are not present.
    jax.config.update("jax_platforms", "cpu")
    exit_with(NAME, main)
