"""Compiles functions whose first argument is a model's weights.

`jit_for_weights` chooses XLA's options by the platform of the weights, and limits the number of
compiled programs that a process keeps on CPUs. `watch_programs` records the programs that run.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from stepprune_jax.models.stack import Params, has_large_layers, unstack
from stepprune_jax.parallel.compiling import options_of
from stepprune_jax.parallel.placement import devices_of
from stepprune_jax.policy.jax_settings import jax_defaults

# Limit of the compiled programs that a process keeps on CPUs. A program takes hundreds of memory
# maps there, about one per kernel, and Linux limits a process to 65,530 maps. A server that gets
# requests of many shapes would fail at about its 130th program.
MAX_PROGRAMS = 96
_cpu_functions: list[Any] = []  # jitted functions whose programs count towards the limit
_num_evicted: collections.Counter[Any] = collections.Counter()  # dropped programs by function
_recordings: list[list["ProgramRun"]] = []  # lists of the active `watch_programs` blocks


class ProgramRun(NamedTuple):
    """A run of a program, as recorded by `watch_programs`.

    Attributes:
        traced: the traced program. Compiling it again takes no time while jax holds it.
        input_bytes: bytes of the arguments, without the weights.
    """

    traced: Any
    input_bytes: int


@contextlib.contextmanager
def watch_programs() -> Iterator[list[ProgramRun]]:
    """Records the calls of all functions of `jit_for_weights` inside a `with` block.

    Yields:
        A list. Each call of such a function appends one `ProgramRun`.
    """
    runs: list[ProgramRun] = []
    _recordings.append(runs)
    try:
        yield runs
    finally:
        _recordings.remove(runs)


def _evict_programs() -> None:
    """Drops all compiled programs on CPUs if their number exceeds `MAX_PROGRAMS`."""
    num_programs = {function: function._cache_size() for function in _cpu_functions}
    if sum(num_programs.values()) > MAX_PROGRAMS:
        _num_evicted.update(num_programs)
        for function in _cpu_functions:
            function.clear_cache()


def num_evicted() -> int:
    """Returns the number of programs on CPUs that were dropped because of `MAX_PROGRAMS`."""
    return _num_evicted.total()


def jit_for_weights(
    function: Callable[..., Any],
    static: tuple[str, ...],
    donate: tuple[str, ...] = (),
    answers: bool = False,
) -> Any:
    """Applies `jax.jit` to a function whose first argument is the weights.

    The function is compiled with the `OPTIONS` of the weights' platform and with jax's default
    settings (`jax_defaults`), independent of the settings of the calling program.

    The layers of a model are stacked in the weights. With `answers`, the function is never
    differentiated, so a program can read large layers without copying slices of the stack. On GPUs
    the program unstacks the layers. On a CPU it receives the layers as separate views. On a TPU no
    change is necessary, because a scan reads slices in place.

    Args:
        function: a function of the weights and further arguments.
        static: names of static arguments.
        donate: names of donated arguments.
        answers: whether the function only runs the model forward.

    Returns:
        The compiled function, with two attributes. `num_compiled()` returns the number of programs
        compiled by this function, including dropped programs. `trace` is the method of `jax.jit`,
        and also accepts abstract weights with a sharding.
    """

    @functools.wraps(function)
    def with_unstacked_layers(params, *args, **kwargs):
        return function(unstack(params) if has_large_layers(params) else params, *args, **kwargs)

    jitted: dict[str, Any] = {
        platform: jax.jit(
            with_unstacked_layers if answers and platform == "gpu" else function,
            static_argnames=static,
            donate_argnames=donate,
            compiler_options=options_of(platform, answers),
        )
        for platform in ("cpu", "gpu", "tpu")
    }
    _cpu_functions.append(jitted["cpu"])

    def select_program(params):
        """Returns the jitted function of the weights' platform, and the weights to call it with."""
        platform, num_devices = devices_of(params)
        if answers and platform == "cpu" and num_devices == 1 and has_large_layers(params):
            params = _layer_views(params)
        return jitted[platform], params

    def call(params, *args, **kwargs):
        program, params = select_program(params)
        with jax_defaults():
            for runs in _recordings:
                leaves = jax.tree.leaves((args, kwargs))
                input_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
                runs.append(ProgramRun(program.trace(params, *args, **kwargs), input_bytes))
            result = program(params, *args, **kwargs)
        if program is jitted["cpu"]:
            _evict_programs()
        return result

    def trace(params, *args, **kwargs):
        program, params = select_program(params)
        return program.trace(params, *args, **kwargs)

    wrapped: Any = functools.update_wrapper(call, function)
    wrapped.num_compiled = lambda: sum(
        program._cache_size() + _num_evicted[program] for program in jitted.values()
    )
    wrapped.trace = jax_defaults()(trace)
    return wrapped


def _layer_views(params: Params) -> Params:
    """Unstacks the layers of weights on a CPU without copies, as views of numpy arrays."""
    if isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
        return jax.eval_shape(unstack, params)
    return unstack(jax.tree.map(np.asarray, params))
