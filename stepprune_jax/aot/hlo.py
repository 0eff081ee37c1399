"""Reading the text of a compiled program."""

import itertools
import re
from typing import NamedTuple

# Instructions that start nothing on the device: names, shapes, and the ends of what began before.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "optimization-barrier",
    "partition-id",
    "replica-id",
    "get-dimension-size",
    "while",
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = (.*)$")
_CALLED = re.compile(r"to_apply=%?([^\s,]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]+)\}|(?:true|false)_computation=([^\s,]+))")
_NAME = re.compile(r'op_name="([^"]*)"')


class Loop(NamedTuple):
    """A loop of a compiled program.

    Attributes:
        name: path of the JAX operation it comes from, for example "jit(pick)/while".
        kernels: that one iteration starts, its condition among them, loops inside of it not.
    """

    name: str
    kernels: int


def loops(text: str) -> tuple[Loop, ...]:
    """Counts what each loop of a program starts on the device in one iteration.

    On a GPU each of them is a kernel or a copy (a product in a library may be two), and a small one
    takes as long as its launch. On a TPU a program is one kernel, and these are its steps.

    Args:
        text: of a compiled, scheduled program: `compiled.as_text()`.

    Returns:
        The loops, outer and inner ones, by falling number of kernels.

    Raises:
        ValueError: the text is not that of a scheduled program.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("expected the text of a compiled program, with is_scheduled=true")
    computations = _computations(text)
    counted = []
    for lines in computations.values():
        for line in lines:
            if _opcode(line) == "while":
                parts = (re.search(rf"{part}=%?([^\s,]+)", line) for part in ("condition", "body"))
                name = _NAME.search(line)
                kernels = sum(_kernels(part.group(1), computations) for part in parts)
                counted.append(Loop(name.group(1) if name else "", kernels))
    return tuple(sorted(counted, key=lambda loop: -loop.kernels))


def _computations(text: str) -> dict[str, list[str]]:
    """Instructions by computation, each without its name."""
    computations, lines = {}, []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header.group(1), [])
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction.group(1))
    return computations


def _opcode(line: str) -> str:
    """What stands behind the type of the result, which may be a tuple of types."""
    depth = 0
    for i, character in enumerate(line):
        depth += (character in "([{") - (character in ")]}")
        if character == " " and not depth:
            return line[i + 1 :].partition("(")[0]
    return ""


def _kernels(name: str, computations: dict[str, list[str]]) -> int:
    """What one pass through a computation starts; of a conditional's branches the longest."""
    count = 0
    for line in computations[name]:
        opcode = _opcode(line)
        if opcode == "call":
            count += _kernels(_CALLED.search(line).group(1), computations)
        elif opcode == "conditional":
            listed = ",".join(filter(None, itertools.chain(*_BRANCHES.findall(line))))
            names = re.findall(r"[^%,\s]+", listed)
            count += max(_kernels(branch, computations) for branch in names)
        elif opcode not in _FREE and not opcode.endswith(("-done", "-update")):
            count += 1
    return count
