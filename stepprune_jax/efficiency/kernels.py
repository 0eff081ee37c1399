"""Kernels of a compiled program, counted in its text."""

import itertools
import re

# Instructions that launch nothing on the device: names, shapes, and ends of asynchronous ones.
FREE = {
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
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PARTS = re.compile(r"(?:condition|body)=%?([^\s,]+)")
_ENTRY = re.compile(r"^ENTRY %?([^\s(]+) \(", re.MULTILINE)


def count_kernels(text: str, trips: int = 1) -> int:
    """Counts the kernels and copies that one run of a program launches on a GPU.

    A product in a library may be two kernels.

    Args:
        text: of the compiled program.
        trips: iterations of a loop of which the compiler does not know how often it runs.

    Returns:
        The number.
    """
    entry = _ENTRY.search(text)
    return kernels_of(entry.group(1), computations_of(text), trips) if entry else 0


def computations_of(text: str) -> dict[str, list[str]]:
    """Returns instructions by computation, each without its name."""
    computations, lines = {}, []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header.group(1), [])
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction.group(1))
    return computations


def opcode(line: str) -> str:
    """Returns the opcode, after the type of the result, which may be a tuple of types."""
    depth = 0
    for i, character in enumerate(line):
        depth += (character in "([{") - (character in ")]}")
        if character == " " and not depth:
            return line[i + 1 :].partition("(")[0]
    return ""


def kernels_of(name: str, computations: dict[str, list[str]], trips: int = 0) -> int:
    """Counts launches of one pass through a computation, with a conditional's longest branch.

    Inner loops are left out, unless `trips` says how often those of unknown length run.
    """
    count = 0
    for line in computations[name]:
        kind = opcode(line)
        if kind == "call":
            count += kernels_of(_CALLED.search(line).group(1), computations, trips)
        elif kind == "conditional":
            listed = ",".join(filter(None, itertools.chain(*_BRANCHES.findall(line))))
            names = re.findall(r"[^%,\s]+", listed)
            count += max(kernels_of(branch, computations, trips) for branch in names)
        elif kind == "while" and trips:
            known = _TRIPS.search(line)
            once = sum(kernels_of(part, computations, trips) for part in _PARTS.findall(line))
            count += once * (int(known.group(1)) if known else trips)
        elif kind not in FREE and not kind.endswith(("-done", "-update")):
            count += 1
    return count
