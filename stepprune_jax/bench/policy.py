"""What the policy costs at the paper's size: N = 576, L_txt = 64, T_max = 288, D = 1024.

    python -m stepprune_jax.bench.policy

Prints the temporary memory of the gradient through the selection at several T_max, for the plain
scan, the scan with saved rows and the parallel estimator; their gradients' difference; the time of
each; the time of the early-exit loop; and the policy's operations per image.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from stepprune_jax import policy
from stepprune_jax.bench.timing import machine, table, time_side_by_side
from stepprune_jax.flops import policy_flops
from stepprune_jax.policy import PolicyConfig

ESTIMATORS = {
    "plain scan": functools.partial(policy.select, rollout_fn=policy.plain_rollout),
    "saved scan": functools.partial(policy.select, rollout_fn=policy.saved_rollout),
    "saved scan, feedback cut": functools.partial(
        policy.select, rollout_fn=policy.saved_rollout, feedback_fn=policy.hard_feedback
    ),
    "parallel": policy.select_parallel,
}


@functools.partial(jax.jit, static_argnames=("config", "steps", "name"))
def selection_gradient(params, memory, weights, *, config, steps, name):
    """Gradient of a weighted sum of soft scores and the expected count, through one selection."""

    def loss(params, memory):
        t = ESTIMATORS[name](params, config, memory, max_steps=steps)
        scores = policy.trajectory_scores(config, t)
        return jnp.sum(scores * weights) + jnp.sum(policy.expected_count(t.stop_prob))

    trained = {"decoder": params["decoder"]}
    return jax.grad(loss, argnums=(0, 1))(trained, memory)


def temporary_bytes(config: PolicyConfig, num_tokens: int, steps: int, name: str) -> int:
    """Temporary memory the compiler plans for `selection_gradient` at batch 1."""
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = policy.abstract_policy(config)
    memory = float32((1, num_tokens + 1, config.policy_width))
    lowered = selection_gradient.lower(
        params, memory, float32((1, num_tokens)), config=config, steps=steps, name=name
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes


def memory_rows(config: PolicyConfig, num_tokens: int, steps: list[int]) -> list[list[object]]:
    """MiB per estimator and T_max, growth from first to last, and the plain scan over each."""
    plan = {
        name: [temporary_bytes(config, num_tokens, t, name) / 2**20 for t in steps]
        for name in ESTIMATORS
    }
    last = plan["plain scan"][-1]
    return [[name, *mib, mib[-1] / mib[0], last / mib[-1]] for name, mib in plan.items()]


def relative_difference(a, b) -> float:
    """Largest ||a - b|| / ||b|| over the leaves of two trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)


def gradient_report(config: PolicyConfig, params, memory, steps: int, repeats: int) -> str:
    """Times and differences of the estimators' gradients."""
    weights = jax.random.normal(jax.random.key(2), (memory.shape[0], memory.shape[1] - 1))
    calls = {
        name: functools.partial(
            selection_gradient, params, memory, weights, config=config, steps=steps, name=name
        )
        for name in ESTIMATORS
    }
    seconds = time_side_by_side(calls, repeats)
    grads = {name: call() for name, call in calls.items()}
    same = {"saved scan": "plain scan", "parallel": "saved scan, feedback cut"}
    rows = [
        [
            name,
            1e3 * s,
            seconds["plain scan"] / s,
            same.get(name, "-"),
            relative_difference(grads[name], grads[same[name]]) if name in same else "-",
        ]
        for name, s in seconds.items()
    ]
    header = ["gradient", "ms", "plain scan / this", "compared with", "relative difference"]
    return table(header, rows)


def inference_report(config: PolicyConfig, params, memory, steps: int, repeats: int) -> str:
    """Times of encoder, scan and early-exit loop; budgets spread about 2/9 of T_max (64 of 288)."""
    batch, n = memory.shape[0], memory.shape[1] - 1
    image = jax.random.normal(jax.random.key(3), (batch, n, config.feature_width))
    text = jax.random.normal(jax.random.key(4), (batch, 64, config.text_width))
    mean = steps * 2 // 9
    budget = (
        jnp.linspace(mean // 4, 2 * mean - mean // 4, batch) if batch > 1 else jnp.array([mean])
    )
    budget = jnp.round(budget).astype(int)
    longest = int(jnp.max(budget))
    encode = jax.jit(policy.encode, static_argnums=1)
    scan = jax.jit(policy.select, static_argnums=1, static_argnames="max_steps")
    loop = jax.jit(policy.pick, static_argnums=1, static_argnames="max_steps")
    seconds = time_side_by_side(
        {
            "encode": lambda: encode(params, config, image, text),
            f"select: scan, {steps} steps": lambda: (
                scan(params, config, memory, max_steps=steps).action
            ),
            f"pick: while_loop, {longest} steps": lambda: loop(
                params, config, memory, max_steps=steps, budget=budget
            ),
        },
        repeats,
    )
    taken = {"select": steps, "pick": longest}
    rows = [
        [name, 1e3 * s, 1e6 * s / taken[name.split(":")[0]] if ":" in name else "-"]
        for name, s in seconds.items()
    ]
    return table([f"inference, batch {batch}", "ms", "us per pointer step"], rows)


def main():
    """Runs the benchmark at the size that the flags name."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num_tokens", type=int, default=576)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=288)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    config = PolicyConfig(feature_width=flags.width)
    n, steps = flags.num_tokens, flags.steps
    print(f"{machine()}\nN {n}, D {flags.width}, {config.decoder_layers} decoder layers\n")

    ladder = [steps // 4, steps // 2, steps]
    header = ["temporary MiB at batch 1", *(f"T_max {t}" for t in ladder)]
    growth = f"{ladder[-1]} / {ladder[0]}"
    rows = memory_rows(config, n, ladder)
    print(table([*header, growth, "plain scan / this"], rows), "\n", flush=True)

    params = policy.init_policy(jax.random.key(0), config)
    for batch in flags.batch:
        memory = jax.random.normal(jax.random.key(1), (batch, n + 1, flags.width))
        if batch == flags.batch[0]:
            print(gradient_report(config, params, memory, steps, flags.repeats), "\n", flush=True)
        print(inference_report(config, params, memory, steps, flags.repeats), "\n", flush=True)

    parts = policy_flops(config, n, 64, 64)
    rows = [[name, value / 1e12] for name, value in parts.items()]
    print(table(["operations per image, K = 64", "T"], rows))


if __name__ == "__main__":
    main()
