"""Reading the text of a compiled program."""

import collections
import itertools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from stepprune_jax.efficiency.kernels import FREE, computations_of, kernels_of, opcode
from stepprune_jax.user_input import UserError

# Computations called by a fusion or a reduction are part of it; calls are not.
_FUSED = re.compile(
    r"\b(?:fusion|reduce|reduce-window|scatter|sort|map)\(.*(?:calls|to_apply)=%?([^\s,]+)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
# Their results are those of instructions in the computations they run.
_CONTROL = {"call", "conditional"}
_THUNK = re.compile(r"^( *)\d+: (k\w+)", re.MULTILINE)
# Thunks that launch no kernel themselves: they hold others.
_HOLDERS = {"kCommandBuffer", "kWhile", "kConditional", "kDynamicSliceFusion", "kSequential"}
_ASYNCHRONOUS = ("-start", "-update", "-done")
_NAME = re.compile(r'op_name="([^"]*)"')
_BACKEND = re.compile(r'custom_call_target="([^"]+)"|"kind":"(__[^"]+)"')


class Loop(NamedTuple):
    """A loop of a compiled program.

    Attributes:
        name: path of the JAX operation it comes from, for example "jit(pick)/while".
        kernels: kernels launched per iteration, including the condition, without inner loops.
    """

    name: str
    kernels: int


def loops(text: str) -> tuple[Loop, ...]:
    """Counts the kernels that each loop of a program launches in one iteration.

    On a GPU each of them is a kernel or a copy (a product in a library may be two), and a small one
    takes as long as its launch. On a TPU a program is one kernel, and these are its steps.
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
    """What a program for a GPU starts.

    Attributes:
        host: kinds of what the host starts one by one: "kCommandBuffer" is a CUDA graph.
        kernels: kernels and copies, also within graphs, each body of a loop or conditional once.
    """

    host: tuple[str, ...]
    kernels: int


def launches(text: str) -> Launches:
    """Counts launches in XLA's dump "thunk_sequence_after_thunk_passes.txt" of a program."""
    found = _THUNK.findall(text)
    if not found:
        raise UserError("expected a sequence of thunks, in lines such as '000: kCommandBuffer'")
    host = tuple(kind for indent, kind in found if not indent)
    return Launches(host, sum(kind not in _HOLDERS for _, kind in found))


def backends(text: str) -> dict[str, int]:
    """Counts what XLA does not generate itself by who does: libraries' calls, Triton's fusions."""
    return dict(collections.Counter(call or fusion for call, fusion in _BACKEND.findall(text)))


def copied_weights(text: str, weights: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Lists arrays in the shape of a weight that a program writes to memory.

    These are copies: slices of a stack, or concatenated, transposed or converted matrices. A
    program whose products read the weights in place has none. A TPU's fetches into its vector
    memory are not copies.
    """
    shapes = [sides for k, n in weights for sides in ((k, n), (n, k))]
    computations = computations_of(text)
    fused = {
        part for line in itertools.chain(*computations.values()) for part in _FUSED.findall(line)
    }
    kept = (lines for name, lines in computations.items() if name not in fused)
    written = itertools.chain(*map(_written, itertools.chain(*kept)))

    def holds_weights(sizes: str) -> bool:
        sides = [int(size) for size in sizes.split(",") if size]
        rest = {side: math.prod(sides) // side for side in sides if side}
        return any(k in rest and rest[k] % n == 0 for k, n in shapes)

    return tuple(f"{kind}[{sizes}]" for kind, sizes in written if holds_weights(sizes))


def _written(line: str) -> list[tuple[str, str]]:
    """Returns types and sizes of the arrays that an instruction writes to device memory."""
    code = opcode(line)
    if code in FREE or code in _CONTROL or code.endswith(_ASYNCHRONOUS):
        return []
    arrays = _ARRAY.findall(line.partition(f" {code}(")[0])
    return [(kind, sizes) for kind, sizes, layout in arrays if "S(" not in layout]
