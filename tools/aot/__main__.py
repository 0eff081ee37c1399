"""Compiles a run's programs for GPUs and TPUs that this machine lacks, and prints a table.

    python -m tools.aot                    # small shapes: minutes
    python -m tools.aot --full             # LLaVA-7B, every ablation and target: hours
    python -m tools.aot --target a6000:2 --config configs/llava7b.py --program update
    python -m tools.aot --target h200 --config shapes --set batch_size=64 --program update

Without flags a selection of targets, configurations and programs is compiled; with flags, all their
combinations. The exit status is 1 if a program failed to compile. With `--results FILE` every
result is saved at once: the same command resumes after an interruption, and recompiles only what
has changed. Kernels "in all" are those of a run in which each loop of unknown length runs once, and
twice; StepPrune's takes 16 tokens at a time.
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
TILED = "configs/llava_next_7b.py"  # images of up to 2,928 tokens
SAMPLED = "configs/rloo.py"  # either, without the gate
TARGETS = ("h200", "a100", "a6000:2", "v5e", "v5e:2x4", "v6e")
# Programs that an ablation of scores affects, and those that one of the selector affects; all
# others are as in `configs/shapes.py`.
LEARNING = ("update",)
CHOOSING = ("update", "rank", *(f"{name} {rows}" for name in ("select", "answer") for rows in ROWS))
PICKS = ("policy.pick 1", "policy.pick 2", "policy.pick 8")
# Programs that have failed on some target, or resemble them.
CRITICAL = (*PICKS, "prefill cut")


class Group(NamedTuple):
    """Combinations to compile; without program names, all programs of the configuration."""

    targets: Sequence[str]
    configs: Sequence[str]
    dtypes: Sequence[str]
    programs: Sequence[str] = ()
    changes: Sequence[str] = ()  # to each configuration


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
    """Reads the flags, and sets the groups that they request."""
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
    chosen = flags.target or flags.config or flags.dtype or flags.program or flags.set
    if flags.full and chosen:
        parser.error("--full has its own targets, configurations and programs: use it alone")
    own = Group(
        flags.target or ("h200", "v5e"),
        flags.config or (SHAPES,),
        flags.dtype or ("float32",),
        flags.program or (),
        flags.set,
    )
    flags.groups = FULL if flags.full else (own,) if chosen else SHORT
    return flags


def compile_row(device_memory: float | int, to: Target, lowered: Any) -> tuple[list[str], bool]:
    """Compiles a program."""
    begin = time.process_time()  # of all threads: wall time depends on the load
    try:
        compiled = to.compile(lowered)
    except jax.errors.JaxRuntimeError as error:
        seconds, said = f"{time.process_time() - begin:.1f}", " ".join(str(error).split())
        if said.startswith("RESOURCE_EXHAUSTED"):
            return ["-", "-", seconds, "does not fit"], True
        return ["-", "-", seconds, "FAILED: " + said[:300].replace("|", "/")], False
    seconds, size = time.process_time() - begin, usage(compiled).total
    text = compiled.as_text()
    kernels = " ".join(str(loop.kernels) for loop in loops(text)) or "-"
    kernels += f"; {count_kernels(text)}, {count_kernels(text, 2)}"
    result = "ok" if size <= device_memory else "does not fit"
    return [f"{size / 2**30:.3f}", kernels, f"{seconds:.1f}", result], True


class Results(dict[str, list[str]]):
    """Table lines by a digest of target, program and compiler.

    Configurations share programs, such as the tower, which are compiled once per target.
    """

    def __init__(self, path: Path | None):
        """Reads the results of earlier runs."""
        super().__init__()
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                digest, *cells = json.loads(line)
                self[digest] = list(map(str, cells))
            except (ValueError, TypeError) as error:
                raise UserError(f"{path}, line {number}: expected a result, {error}") from error

    def keep(self, digest: str, cells: list[str]) -> None:
        """Adds a program that compiled."""
        self[digest] = cells
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([digest, *cells]) + "\n")


def rows(group: Group, done: Results) -> Iterator[tuple[list[str], bool]]:
    """Compiles a group: the lines of the table, and whether each program compiled."""
    for name, config, dtype in itertools.product(group.targets, group.configs, group.dtypes):
        to = make_target(name)
        kind = to.devices[0].device_kind
        # TPUs have less memory each: there the frozen weights are sharded.
        preset = "fsdp" if kind.startswith("TPU") else "data"
        run = configurations.load(config, group.changes)
        programs = Programs(run, build_mesh(preset, to.devices), dtype)
        known = programs.names()
        unknown = sorted(set(group.programs) - set(known))
        if unknown:
            raise UserError(f"{config} has no program {unknown[0]!r}, it has {', '.join(known)}")
        for program in group.programs or known:
            settings = " ".join((config, *group.changes))
            head = [name, str(len(to.devices)), settings, dtype, program]
            lowered = programs.trace(program).lower()
            text = f"{name} {jax.__version__} {lowered.as_text()}"
            digest = hashlib.sha256(text.encode()).hexdigest()
            same = done.get(digest)
            if same is None:
                cells, compiled = compile_row(ACCELERATORS[known_as(kind)].memory, to, lowered)
                if compiled:
                    done.keep(digest, [*head, *cells])
                yield [*head, *cells], compiled
            elif same[:5] == head:
                yield same, True
            else:
                yield [*head, *same[5:7], "0", f"{same[-1]} (as {same[2]}, {same[3]})"], True
        _release_memory()


def _release_memory() -> None:
    """Gives what compilers have freed back to the system; glibc would keep it, many GiB in time."""
    jax.clear_caches()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a program failed to compile, otherwise 0."""
    flags = parse(arguments)
    done = Results(flags.results)
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    failed = 0
    for group in flags.groups:
        for row, compiled in rows(group, done):
            print("| " + " | ".join(row) + " |", flush=True)
            failed += not compiled
    if failed:
        print(f"{NAME}: {failed} program(s) failed to compile", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    # Before jax looks for devices: there is none to use.
    jax.config.update("jax_platforms", "cpu")
    exit_with(NAME, main)
