"""Measures the cost of the policy at the paper's size: N = 576, L_txt = 64, T_max = 288, D = 1024.

    python -m tools.bench.policy

The command prints the temporary memory of the gradient through the selection for several T_max,
with the loop and with the parallel estimator, the time of both gradients, and their difference. It
also prints the time of the pointer loop step by step and with slot tables, for one and two decoder
layers, and the policy's operations per image.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stepprune_jax import policy
from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.efficiency.timing import table
from stepprune_jax.flops import policy_flops
from stepprune_jax.policy import POINTER, Limits, PolicyConfig, selection
from stepprune_jax.policy.rollout import hard_feedback, start_episode
from stepprune_jax.policy.scores import expected_count
from stepprune_jax.policy.selection import select_loop, select_parallel
from tools.bench.timing import machine, time_side_by_side

PARTS = ("gradient", "loop", "operations")

ESTIMATORS = {
    "loop": select_loop,
    "loop, feedback cut": functools.partial(select_loop, feedback=hard_feedback),
    "parallel": select_parallel,
}


@functools.partial(jax.jit, static_argnames=("config", "steps", "name"))
def selection_gradient(params, memory, weights, *, config, steps, name):
    """Returns the gradient of a weighted sum of soft scores and the expected count."""

    def loss(params, memory):
        episode = start_episode(params, config, memory, limits=Limits(max_steps=steps))
        t = ESTIMATORS[name](params, config, episode)
        scores = policy.trajectory_scores(config, t)
        return jnp.sum(scores * weights) + jnp.sum(expected_count(t.stop_prob))

    trained = {"decoder": params["decoder"]}
    return jax.grad(loss, argnums=(0, 1))(trained, memory)


def temporary_bytes(config: PolicyConfig, num_tokens: int, steps: int, name: str) -> int:
    """Returns the temporary memory of `selection_gradient` at batch 1, as the compiler plans it."""
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = policy.abstract_policy(config)
    memory = float32((1, num_tokens + 1, config.policy_width))
    lowered = selection_gradient.lower(
        params, memory, float32((1, num_tokens)), config=config, steps=steps, name=name
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes


def memory_rows(config: PolicyConfig, num_tokens: int, steps: list[int]) -> list[list[object]]:
    """Returns a row for each estimator: MiB for each T_max, and their ratio."""
    plan = {
        name: [temporary_bytes(config, num_tokens, t, name) / 2**20 for t in steps]
        for name in ESTIMATORS
    }
    return [[name, *mib, mib[-1] / mib[0]] for name, mib in plan.items()]


def relative_difference(a, b) -> float:
    """Returns the largest ||a - b|| / ||b|| over the leaves of two trees, with 0 / 0 = 0."""

    def of_leaf(x: jax.Array, y: jax.Array) -> float:
        difference, size = float(jnp.linalg.norm(x - y)), float(jnp.linalg.norm(y))
        if difference == 0:  # Both are zero for a weight that does not affect the selection.
            return 0.0
        return difference / size if size else math.inf

    return max(jax.tree.leaves(jax.tree.map(of_leaf, a, b)))


def gradient_report(config: PolicyConfig, params, memory, steps: int, repeats: int) -> str:
    """Returns a table with the times of the gradients, and the difference of the estimators."""
    weights = jax.random.normal(jax.random.key(2), (memory.shape[0], memory.shape[1] - 1))
    calls = {
        name: functools.partial(
            selection_gradient, params, memory, weights, config=config, steps=steps, name=name
        )
        for name in ESTIMATORS
    }
    seconds = time_side_by_side(calls, repeats)
    grads = {name: call() for name, call in calls.items()}
    rows = [
        [name, 1e3 * duration, seconds["loop"] / duration] for name, duration in seconds.items()
    ]
    difference = relative_difference(grads["parallel"], grads["loop, feedback cut"])
    return f"""{table(["gradient", "ms", "loop / this"], rows)}

parallel and loop, feedback cut: relative difference {difference:.3g}"""


def step_by_step(*arguments):
    """Calls the pointer's step. The wrapper disables slot tables, which need the built-in step."""
    return POINTER.step(*arguments)


@functools.partial(jax.jit, static_argnames=("config", "steps", "group", "tables"))
def pick(params, memory, budget, *, config, steps, group=1, tables=True):
    """Selects `budget` tokens."""
    decoder = POINTER if tables else policy.DecoderFns(POINTER.init, step_by_step)
    limits = Limits(budget, max_steps=steps, group=group)
    episode = start_episode(params, config, memory, limits=limits, decoder=decoder)
    return selection.choose_tokens(params, config, episode, decoder)


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def pick_and_stop(params, memory, max_tokens, *, config, steps):
    """Selects `max_tokens` tokens, and evaluates a stop that never ends the selection."""
    limits = Limits(max_tokens=max_tokens, max_steps=steps)
    episode = start_episode(params, config, memory, limits=limits, stop_bias=-1e6)
    return selection.choose_tokens(params, config, episode)


class Size(NamedTuple):
    """Size of the loop: rows, tokens, T_max, and kept tokens."""

    batch: int
    num_tokens: int
    steps: int
    kept: int


def loop_report(
    config: PolicyConfig, size: Size, layers: list[int], groups: list[int], repeats: int
) -> str:
    """Returns a table with the times of the encoder and of variants of the pointer loop."""
    batch, num_tokens, steps, kept = size
    normal = functools.partial(jax.random.normal, dtype=jnp.dtype(config.dtype))
    memory = normal(jax.random.key(1), (batch, num_tokens + 1, config.policy_width))
    image = normal(jax.random.key(3), (batch, num_tokens, config.feature_width))
    text = normal(jax.random.key(4), (batch, 64, config.text_width))
    budget = jnp.full(batch, kept)
    encode = jax.jit(policy.encode)
    calls, baselines = {}, {}
    for count in layers:
        shape = dataclasses.replace(config, decoder_layers=count)
        params = policy.init_policy(jax.random.key(0), shape)
        params = policy.cast_weights(params, shape.dtype)
        if not calls:
            calls["encoder"] = functools.partial(encode, params, shape, policy.Inputs(image, text))
        functions = {"step by step": functools.partial(pick, tables=False)}
        functions["tables, and the stop"] = pick_and_stop
        for group in groups:
            name = "tables" if group == 1 else f"tables, {group} tokens a step"
            functions[name] = functools.partial(pick, group=group)
        for name, function in functions.items():
            name = f"{name}; {count} decoder layer{'s' * (count > 1)}"
            calls[name] = functools.partial(
                function, params, memory, budget, config=shape, steps=steps
            )
            baselines[name] = f"step by step{name[name.index(';') :]}"
    seconds = time_side_by_side(calls, repeats)
    rows = [
        [
            name,
            1e3 * duration,
            1e6 * duration / kept if name in baselines else "-",
            seconds[baselines[name]] / duration if name in baselines else "-",
        ]
        for name, duration in seconds.items()
    ]
    header = [f"batch {batch}, {kept} tokens", "ms", "us a token", "step by step / this"]
    return table(header, rows)


def main(arguments: list[str] | None = None):
    """Runs the command."""
    parser = Parser(prog="tools.bench.policy", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--num_tokens", type=integer_from(1), default=576)
    parser.add_argument("--width", type=integer_from(1), default=1024)
    parser.add_argument("--steps", type=integer_from(4), default=288)
    parser.add_argument("--kept", type=integer_from(1), default=64)
    parser.add_argument("--layers", type=integer_from(1), nargs="+", default=[1, 2])
    parser.add_argument("--group", type=integer_from(1), nargs="+", default=[1, 4])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=integer_from(1), nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=integer_from(1), default=3)
    flags = parser.parse_args(arguments)
    n, steps = flags.num_tokens, flags.steps
    if not flags.kept <= steps <= n:
        parser.error(f"expected --kept ({flags.kept}) <= --steps ({steps}) <= --num_tokens ({n})")
    # Gradients are measured with the deepest decoder.
    config = PolicyConfig(
        feature_width=flags.width, dtype=flags.dtype, decoder_layers=max(flags.layers)
    )
    print(machine(), flush=True)
    print(f"N {n}, D {flags.width}, {flags.dtype}\n", flush=True)

    if "gradient" in flags.parts:
        ladder = [steps // 4, steps // 2, steps]
        header = ["temporary MiB at batch 1", *(f"T_max {t}" for t in ladder)]
        growth = f"{ladder[-1]} / {ladder[0]}"
        rows = memory_rows(config, n, ladder)
        print(table([*header, growth], rows), "\n", flush=True)
        params = policy.init_policy(jax.random.key(0), config)
        memory = jax.random.normal(jax.random.key(1), (flags.batch[0], n + 1, flags.width))
        print(gradient_report(config, params, memory, steps, flags.repeats), "\n", flush=True)
    if "loop" in flags.parts:
        for batch in flags.batch:
            size = Size(batch, n, steps, flags.kept)
            report = loop_report(config, size, flags.layers, flags.group, flags.repeats)
            print(report, "\n", flush=True)
    if "operations" in flags.parts:
        shapes = [dataclasses.replace(config, decoder_layers=layers) for layers in flags.layers]
        parts = [policy_flops(shape, n, 64, flags.kept, exact=False) for shape in shapes]
        rows = [[name, *(part[name] / 1e9 for part in parts)] for name in parts[0]]
        header = [f"{layers} decoder layer{'s' * (layers > 1)}" for layers in flags.layers]
        print(table([f"10^9 operations per image, K = {flags.kept}", *header], rows), "\n")


if __name__ == "__main__":
    exit_with("tools.bench.policy", main)
