"""Counts the kernels of a compiled program in its text."""

import itertools
import re

# Instructions that launch no kernel: they only name values, change shapes, or wait.
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

    A matrix product of a library counts as one kernel, although it may launch two.

    Args:
        text: the optimized HLO text of the compiled program.
        trips: assumed iterations of a loop whose number of iterations the compiler does not know.
    """
    entry = _ENTRY.search(text)
    return kernels_of(entry.group(1), computations_of(text), trips) if entry else 0


def computations_of(text: str) -> dict[str, list[str]]:
    """Returns the instructions of each computation, without the names of their results."""
    computations, lines = {}, []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header.group(1), [])
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction.group(1))
    return computations


def opcode(line: str) -> str:
    """Returns the opcode of an instruction, which follows the type of the result."""
    depth = 0
    for index, character in enumerate(line):
        depth += (character in "([{") - (character in ")]}")
        if character == " " and not depth:
            return line[index + 1 :].partition("(")[0]
    return ""


def kernels_of(name: str, computations: dict[str, list[str]], trips: int = 0) -> int:
    """Counts the kernels of one pass through a computation.

    A conditional counts as its longest branch.

    Args:
        name: name of the computation.
        computations: result of `computations_of`.
        trips: assumed iterations of inner loops of unknown length; 0 omits all inner loops.
    """
    count = 0
    for line in computations[name]:
        operation = opcode(line)
        if operation == "call":
            count += kernels_of(_CALLED.search(line).group(1), computations, trips)
        elif operation == "conditional":
            branch_list = ",".join(filter(None, itertools.chain(*_BRANCHES.findall(line))))
            names = re.findall(r"[^%,\s]+", branch_list)
            count += max(kernels_of(branch, computations, trips) for branch in names)
        elif operation == "while" and trips:
            known_trips = _TRIPS.search(line)
            kernels_per_trip = sum(
                kernels_of(computation, computations, trips) for computation in _PARTS.findall(line)
            )
            count += kernels_per_trip * (int(known_trips.group(1)) if known_trips else trips)
        elif operation not in FREE and not operation.endswith(("-done", "-update")):
            count += 1
    return count
