"""Does all that a GPU is wanted for, in a few minutes: times, programs, products, tests, training.

    python -m tools.card --out DIR               # LLaVA-7B, at most 9 minutes
    python -m tools.card --out DIR --small       # small shapes, for any device

Each section is a process of its own, which is ended at its limit. What it has found is in DIR as
soon as it is found; DIR/summary.md, the tables of all, is written anew after each section.
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
_GRACE = 10  # seconds to end in, as a run of train.py does
_LEAST = 15  # seconds in which a section may find something
_DRIVER = Path("/proc/driver/nvidia/version")


def run(section: Section, out: Path, scratch: Path, limit: float) -> str:
    """Runs a section; returns how it ended."""
    begin, log = time.monotonic(), out / f"{section.name}.log"
    with log.open("wb") as file:
        streams = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        environment = section.environment(scratch)
        line = [sys.executable, *section.command]
        process = subprocess.Popen(line, cwd=ROOT, env=environment, **streams)
    ended = ""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        ended = f"ended at its limit of {limit:.0f} s"
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    finally:
        with contextlib.suppress(ProcessLookupError):  # with what it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if autotuned(scratch).is_file():
        shutil.move(autotuned(scratch), out / f"{section.name}.autotune.pbtxt")
    seconds = time.monotonic() - begin
    if process.returncode and not ended:
        ended = f"failed with status {process.returncode} after {seconds:.0f} s: {_reason(log)}"
    return ended or f"done in {seconds:.0f} s"


def _reason(log: Path) -> str:
    """Returns the last line of a log that names an error, or else the last one."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"(error|Error|Exception)\b", line)]
    return (named or lines or ["it says nothing"])[-1][:200]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the sections."""
    parser = Parser(
        prog=_NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder for what is found")
    parser.add_argument("--minutes", type=float, default=9.0, help="time of all sections together")
    parser.add_argument("--small", action="store_true", help="small shapes, for any device")
    parser.add_argument("--sections", nargs="+", help="some of them; default: all")
    given = parser.parse_args(arguments)
    begin, summary = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        out = local_path(given.out).resolve()
        out.mkdir(parents=True, exist_ok=True)
        known = {x.name: x for x in sections(out, Path(scratch), given.small)}
        names = given.sections or list(known)
        expect("--sections", names, {*names} <= {*known}, f"some of {', '.join(known)}")
        for name, kind in itertools.product(names, ("json", "jsonl", "log")):
            (out / f"{name}.{kind}").unlink(missing_ok=True)  # left by an earlier run
        for number, name in enumerate(names, 1):
            left = 60 * given.minutes - (time.monotonic() - begin)
            limit = min(known[name].seconds, left - _GRACE)
            print(f"{name}, {number} of {len(names)}: {left:.0f} s left", flush=True)
            if known[name].needs_gpu and not _DRIVER.is_file():
                ended = "needs a GPU"
            elif limit < _LEAST:
                ended = "no time left"
            else:
                ended = run(known[name], out, Path(scratch), limit)
            summary.append(f"## {name}: {ended}\n\n{figures.read(out, name)}")
            print(summary[-1], flush=True)
            (out / "summary.md").write_text("\n".join(summary), encoding="utf-8")
    print("\n".join(["", f"# {out / 'summary.md'}", "", *summary]))


if __name__ == "__main__":
    exit_with(_NAME, main)
