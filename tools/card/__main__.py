"""Measures a GPU in a few minutes: times, programs, matrix products, tests and training.

    python -m tools.card --out DIR               # LLaVA-7B, at most 9 minutes
    python -m tools.card --out DIR --small       # small shapes, for any device

Each section runs in a separate process, which is ended at a time limit. A section writes each
result to DIR at once. After each section, the command rewrites DIR/summary.md, the tables of all
sections.
"""

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.cli.command_line import Parser, exit_with
from stepprune_jax.user_input import expect, local_path
from tools.card import figures
from tools.card.sections import ROOT, Section, autotuned, sections

_NAME = "python -m tools.card"
_GRACE = 10  # Seconds for a terminated process to end, which train.py needs to save its state.
_MIN_SECONDS = 15  # A section with less time would not have a result.
_DRIVER = Path("/proc/driver/nvidia/version")


def run(section: Section, out: Path, scratch: Path, seconds_limit: float) -> str:
    """Runs a section.

    Args:
        section: the section.
        out: folder for the log and the results.
        scratch: folder that all sections share.
        seconds_limit: time limit.

    Returns:
        The outcome in words.
    """
    start_time, log = time.monotonic(), out / f"{section.name}.log"
    with log.open("wb") as file:
        streams = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        environment = section.environment(scratch)
        command = [sys.executable, *section.command]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)
    outcome = ""
    try:
        process.wait(seconds_limit)
    except subprocess.TimeoutExpired:
        outcome = f"ended at its limit of {seconds_limit:.0f} s"
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    finally:
        with contextlib.suppress(
            ProcessLookupError
        ):  # Also ends processes that the section started.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if autotuned(scratch).is_file():
        shutil.move(autotuned(scratch), out / f"{section.name}.autotune.pbtxt")
    seconds = time.monotonic() - start_time
    if process.returncode and not outcome:
        outcome = f"failed with status {process.returncode} after {seconds:.0f} s: {_reason(log)}"
    return outcome or f"done in {seconds:.0f} s"


def _reason(log: Path) -> str:
    """Returns the last line of a log that names an error, or the last line without such a line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    error_lines = [line for line in lines if re.search(r"(error|Error|Exception)\b", line)]
    return (error_lines or lines or ["the log is empty"])[-1][:200]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(
        prog=_NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="time of all sections")
    parser.add_argument("--small", action="store_true", help="small shapes, for any device")
    parser.add_argument("--sections", nargs="+", help="sections to run; default: all")
    flags = parser.parse_args(arguments)
    start_time, summary = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        out = local_path(flags.out).resolve()
        out.mkdir(parents=True, exist_ok=True)
        sections_by_name = {
            section.name: section for section in sections(out, Path(scratch), flags.small)
        }
        names = flags.sections or list(sections_by_name)
        expect(
            "--sections",
            names,
            {*names} <= {*sections_by_name},
            f"some of {', '.join(sections_by_name)}",
        )
        for name, kind in itertools.product(names, ("json", "jsonl", "log")):
            (out / f"{name}.{kind}").unlink(missing_ok=True)  # Results of an earlier run.
        for number, name in enumerate(names, 1):
            seconds_left = 60 * flags.minutes - (time.monotonic() - start_time)
            seconds_limit = min(sections_by_name[name].seconds, seconds_left - _GRACE)
            print(f"{name}, {number} of {len(names)}: {seconds_left:.0f} s left", flush=True)
            if sections_by_name[name].needs_gpu and not _DRIVER.is_file():
                outcome = "needs a GPU"
            elif seconds_limit < _MIN_SECONDS:
                outcome = "no time left"
            else:
                outcome = run(sections_by_name[name], out, Path(scratch), seconds_limit)
            summary.append(f"## {name}: {outcome}\n\n{figures.read(out, name)}")
            print(summary[-1], flush=True)
            (out / "summary.md").write_text("\n".join(summary), encoding="utf-8")
    print("\n".join(["", f"# {out / 'summary.md'}", "", *summary]))


if __name__ == "__main__":
    exit_with(_NAME, main)
