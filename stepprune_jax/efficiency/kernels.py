"""Counts the kernels of a compiled program from its HLO text.

HLO is XLA's representation of programs. A program consists of computations: lists of instructions,
such as the body of a loop. The entry computation runs first and calls further computations.
"""

import itertools
import re

# Opcodes that launch no kernel: they only name values, reinterpret shapes, or wait.
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
# Name of a computation in its first line, "%name (parameters) -> result {".
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([^\s(]+) \(.*\{$")
# Type, opcode and operands of an instruction, "  %name = type opcode(operands), attributes".
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = (.*)$")
# Names of computations in attributes of instructions: a call, a conditional, and a loop.
_CALLED = re.compile(r"to_apply=%?([^\s,]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]+)\}|(?:true|false)_computation=([^\s,]+))")
_LOOP_PARTS = re.compile(r"(?:condition|body)=%?([^\s,]+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
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
    """Splits a program into its computations.

    Args:
        text: the optimized HLO text of the compiled program.

    Returns:
        The instructions of each computation by its name, as "type opcode(operands), attributes".
    """
    computations, instructions = {}, []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            instructions = computations.setdefault(header.group(1), [])
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction.group(1))
    return computations


def opcode(instruction: str) -> str:
    """Returns the opcode of an instruction.

    Args:
        instruction: "type opcode(operands), attributes". The type of a tuple contains spaces inside
            brackets, such as "(f32[2]{0}, s32[])".
    """
    bracket_depth = 0
    for index, character in enumerate(instruction):
        bracket_depth += (character in "([{") - (character in ")]}")
        if character == " " and bracket_depth == 0:  # The end of the type.
            return instruction[index + 1 :].partition("(")[0]
    return ""


def kernels_of(name: str, computations: dict[str, list[str]], trips: int = 0) -> int:
    """Counts the kernels that one execution of a computation launches.

    A conditional counts as its branch with the most kernels.

    Args:
        name: name of the computation.
        computations: result of `computations_of`.
        trips: assumed iterations of inner loops of unknown length; 0 omits all inner loops.
    """
    num_kernels = 0
    for instruction in computations[name]:
        operation = opcode(instruction)
        if operation == "call":
            (called_name,) = _CALLED.findall(instruction)
            num_kernels += kernels_of(called_name, computations, trips)
        elif operation == "conditional":
            # Joins the two forms of the attribute: a list of names, or one name each for true and
            # false.
            matches = itertools.chain(*_BRANCHES.findall(instruction))
            branch_names = re.findall(r"[^%,\s]+", ",".join(filter(None, matches)))
            num_kernels += max(kernels_of(branch, computations, trips) for branch in branch_names)
        elif operation == "while" and trips:
            known_trips = _KNOWN_TRIPS.search(instruction)
            num_trips = int(known_trips.group(1)) if known_trips else trips
            loop_parts = _LOOP_PARTS.findall(instruction)
            num_kernels += num_trips * sum(
                kernels_of(part, computations, trips) for part in loop_parts
            )
        elif operation not in FREE and not operation.endswith(("-done", "-update")):
            num_kernels += 1  # A "-done" or "-update" only completes a "-start".
    return num_kernels
