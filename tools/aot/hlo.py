"""Reads loops, launches and copies from the text of a compiled program."""

import collections
import itertools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from stepprune_jax.efficiency.kernels import FREE, computations_of, kernels_of, opcode
from stepprune_jax.user_input import UserError

# Matches instructions whose called computations are part of the instruction's kernel.
_FUSED = re.compile(
    r"\b(?:fusion|reduce|reduce-window|scatter|sort|map)\(.*(?:calls|to_apply)=%?([^\s,]+)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
# The computations of these instructions write their results.
_CONTROL = {"call", "conditional"}
_THUNK = re.compile(r"^( *)\d+: (k\w+)", re.MULTILINE)
# Thunks that launch no kernel themselves, because they contain other thunks.
_CONTAINERS = {"kCommandBuffer", "kWhile", "kConditional", "kDynamicSliceFusion", "kSequential"}
_ASYNCHRONOUS = ("-start", "-update", "-done")
_NAME = re.compile(r'op_name="([^"]*)"')
_BACKEND = re.compile(r'custom_call_target="([^"]+)"|"kind":"(__[^"]+)"')


class Loop(NamedTuple):
    """A loop of a compiled program.

    Attributes:
        name: path of the JAX operation, for example "jit(pick)/while".
        kernels: kernels launched per iteration, including the condition, without inner loops.
    """

    name: str
    kernels: int


def loops(text: str) -> tuple[Loop, ...]:
    """Counts the kernels that each loop of a program launches in one iteration.

    On a GPU, each count is a kernel or a copy. A matrix product in a library may launch two
    kernels, and a small kernel takes as long as its launch. On a TPU, a program is one kernel, and
    the counts are steps of the kernel.

    Raises:
        UserError: the text is not of a compiled program.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise UserError("expected the text of a compiled program, with is_scheduled=true")
    computations = computations_of(text)
    counted = []
    for lines in computations.values():
        for line in lines:
            if opcode(line) == "while":
                parts = (re.search(rf"{part}=%?([^\s,]+)", line) for part in ("condition", "body"))
                name = _NAME.search(line)
                kernels = sum(kernels_of(part.group(1), computations) for part in parts)
                counted.append(Loop(name.group(1) if name else "", kernels))
    return tuple(sorted(counted, key=lambda loop: -loop.kernels))


class Launches(NamedTuple):
    """The launches of a program for a GPU.

    Attributes:
        host: types of the thunks that the host starts; "kCommandBuffer" is a CUDA graph.
        kernels: number of kernels and copies, including graphs. Each body of a loop or conditional
            counts once.
    """

    host: tuple[str, ...]
    kernels: int


def launches(text: str) -> Launches:
    """Counts the launches in XLA's dump "thunk_sequence_after_thunk_passes.txt" of a program.

    Raises:
        UserError: the text is no sequence of thunks.
    """
    thunks = _THUNK.findall(text)
    if not thunks:
        raise UserError("expected a sequence of thunks, in lines such as '000: kCommandBuffer'")
    host = tuple(kind for indent, kind in thunks if not indent)
    return Launches(host, sum(kind not in _CONTAINERS for _, kind in thunks))


def backends(text: str) -> dict[str, int]:
    """Counts the kernels that XLA does not generate, by library call or type of fusion."""
    return dict(collections.Counter(call or fusion for call, fusion in _BACKEND.findall(text)))


def copied_weights(text: str, weights: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Lists arrays with the shape of a weight that a program writes to memory.

    Such arrays are copies of weights: slices of a stack, or concatenated, transposed or converted
    matrices. Products that read the weights in place write no copy. Transfers into a TPU's vector
    memory do not count.

    Args:
        text: the text of the compiled program.
        weights: shapes [k, n] of the weights.
    """
    shapes = [sides for k, n in weights for sides in ((k, n), (n, k))]
    computations = computations_of(text)
    fused = {
        part for line in itertools.chain(*computations.values()) for part in _FUSED.findall(line)
    }
    unfused = (lines for name, lines in computations.items() if name not in fused)
    written = itertools.chain(*map(_written, itertools.chain(*unfused)))

    def holds_weights(sizes: str) -> bool:
        sides = [int(size) for size in sizes.split(",") if size]
        quotients = {side: math.prod(sides) // side for side in sides if side}
        return any(k in quotients and quotients[k] % n == 0 for k, n in shapes)

    return tuple(f"{kind}[{sizes}]" for kind, sizes in written if holds_weights(sizes))


def _written(line: str) -> list[tuple[str, str]]:
    """Returns types and sizes of the arrays that an instruction writes to device memory."""
    code = opcode(line)
    if code in FREE or code in _CONTROL or code.endswith(_ASYNCHRONOUS):
        return []
    arrays = _ARRAY.findall(line.partition(f" {code}(")[0])
    return [(kind, sizes) for kind, sizes, layout in arrays if "S(" not in layout]
