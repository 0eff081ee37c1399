"""A toy that needs no weights and no data: random features, and a frozen reader as toy loss.

Each "image" is a bag of N random tokens. A token carries a marker (one of four) and a payload (one
of eight), each a fixed random direction. The question names a marker; the answer is the histogram
of payloads over the tokens with that marker, of which there are one to eight. A frozen, hand-made
reader stands in for the language model: it attends to tokens by marker and averages their payload
posteriors. The loss is the divergence of its histogram from the true one.

The world shows the mechanics (tokens are found, their number is learned, both from the reader's
loss alone), and nothing about any real model.
"""

import functools
import json
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax import policy
from stepprune_jax.policy import PolicyConfig

MARKERS, PAYLOADS, MOST = 4, 8, 8


class Batch(NamedTuple):
    """Random bags with one question each.

    Attributes:
      image: Tokens: marker + payload + noise.
      text: The marker asked for, as one text token.
      answer: True histogram of payloads.
      relevant: Number of tokens with that marker.
    """

    image: Float[Array, "b n d"]
    text: Float[Array, "b 1 d"]
    answer: Float[Array, "b p"]
    relevant: Int[Array, "b"]


class World(NamedTuple):
    """The fixed directions of markers and payloads, orthonormal and scaled."""

    marker: Float[Array, "c d"]
    payload: Float[Array, "p d"]


def make_world(width: int) -> World:
    """Directions of markers and payloads, the same in every run."""
    basis = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (width, MARKERS + PAYLOADS)))[0].T
    scaled = basis * jnp.sqrt(width)
    return World(scaled[:MARKERS], scaled[MARKERS:])


def draw_batch(key: Array, world: World, batch: int, num_tokens: int) -> Batch:
    """Draws a batch; `key` is consumed."""
    count_key, order_key, other_key, payload_key, noise_key, text_key = jax.random.split(key, 6)
    asked = jax.random.randint(text_key, (batch,), 0, MARKERS)
    relevant = jax.random.randint(count_key, (batch,), 1, MOST + 1)
    rank = jnp.argsort(jax.random.uniform(order_key, (batch, num_tokens)), axis=1)
    hit = rank < relevant[:, None]
    shift = jax.random.randint(other_key, hit.shape, 1, MARKERS)
    marker = jnp.where(hit, asked[:, None], (asked[:, None] + shift) % MARKERS)
    payload = jax.random.randint(payload_key, hit.shape, 0, PAYLOADS)
    noise = jax.random.normal(noise_key, (*hit.shape, world.marker.shape[1]))
    image = world.marker[marker] + world.payload[payload] + 0.3 * noise
    answer = jnp.einsum("bn,bnp->bp", hit.astype(jnp.float32), jax.nn.one_hot(payload, PAYLOADS))
    answer = answer / relevant[:, None]
    return Batch(image, world.marker[asked][:, None], answer, relevant)


def reader_loss(
    world: World, tokens: Float[Array, "b k d"], valid: Bool[Array, "b k"], batch: Batch
) -> Float[Array, ""]:
    """Mean divergence, in nats, of the frozen reader's histogram from the true one.

    Args:
      world: Directions of markers and payloads.
      tokens: Tokens to read: all of them gated, or a padded selection.
      valid: True at real tokens.
      batch: Question and answer.
    """
    width = tokens.shape[-1]
    by_marker = jnp.einsum("bkd,bd->bk", tokens, batch.text[:, 0]) * (8 / width)
    attention = jax.nn.softmax(jnp.where(valid, by_marker, -1e9), axis=-1)
    posterior = jax.nn.softmax(jnp.einsum("bkd,pd->bkp", tokens, world.payload) * (8 / width))
    read = jnp.einsum("bk,bkp->bp", attention, posterior)
    cross = -jnp.sum(batch.answer * jnp.log(read + 1e-4), axis=-1)
    entropy = -jnp.sum(batch.answer * jnp.log(batch.answer + 1e-9), axis=-1)
    return jnp.mean(cross - entropy)


class State(NamedTuple):
    """What training changes."""

    params: Any
    optimizer: Any
    running_count: Float[Array, ""]


def make_optimizer(config: Any) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipping."""
    o = config.optimizer
    warmup = round(o.warmup * config.steps)
    schedule = optax.warmup_cosine_decay_schedule(0.0, o.lr, warmup, config.steps, o.final_lr)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-4))


@functools.partial(jax.jit, static_argnames=("config", "optimizer", "shape"), donate_argnums=0)
def train_step(state: State, world: World, key, text_gate, *, config, optimizer, shape):
    """One update; returns the new state and scalars."""
    draw_key, gate_key = jax.random.split(key)
    batch = draw_batch(draw_key, world, *shape)
    everything = jnp.ones(batch.image.shape[:2], bool)

    def loss(params):
        return policy.train_loss(
            params, config, gate_key, batch.image, batch.text,
            lambda tokens: reader_loss(world, tokens, everything, batch),
            text_gate=text_gate, running_count=state.running_count,
        )  # fmt: skip

    (value, gated), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, moments = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    scalars = {"loss": value, **policy.policy_metrics(gated)}
    return State(params, moments, gated.running_count), scalars


def _start(config: Any) -> tuple[PolicyConfig, optax.GradientTransformation, State]:
    shape = PolicyConfig(**config.policy)
    optimizer = make_optimizer(config)
    params = policy.init_policy(jax.random.key(config.seed), shape)
    return shape, optimizer, State(params, optimizer.init(params), jnp.zeros(()))


def train(config: Any, workdir: str | pathlib.Path):
    """Trains the policy on the toy; resumes from the last checkpoint in `workdir` exactly.

    Writes `metrics.jsonl`, one object a line, and `checkpoints/`.
    """
    workdir = pathlib.Path(workdir).resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    shape, optimizer, state = _start(config)
    world, step = make_world(shape.feature_width), 0
    print(f"Toy: random features, toy loss. {config.steps} steps, writing to {workdir}")
    with ocp.CheckpointManager(workdir / "checkpoints") as checkpoints:
        if checkpoints.latest_step() is not None:
            step = checkpoints.latest_step()
            state = checkpoints.restore(step, args=ocp.args.StandardRestore(state))
            print(f"Resuming after step {step}")
        begin, first = time.time(), step
        with _metrics_after(workdir / "metrics.jsonl", step) as log:
            while step < config.steps:
                key = jax.random.fold_in(jax.random.key(config.seed + 1), step)
                gate = jnp.float32(min(1.0, step / (config.text_gate_anneal * config.steps)))
                state, scalars = train_step(
                    state, world, key, gate, config=shape, optimizer=optimizer,
                    shape=(config.batch_size, config.num_tokens),
                )  # fmt: skip
                step += 1
                if step % config.log_every == 0 or step == config.steps:
                    row = {"step": step} | {k: float(v) for k, v in scalars.items()}
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                    left = (time.time() - begin) / (step - first) * (config.steps - step)
                    print(
                        f"step {step:5d}  loss {row['loss']:.3f}  K {row['k_mean']:.1f}  "
                        f"IoU {row['iou']:.2f}  {left:.0f} s left"
                    )
                    checkpoints.save(step, args=ocp.args.StandardSave(state))


def _metrics_after(path: pathlib.Path, step: int):
    """Opens the metrics for appending, without lines that a resumed run will write again."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    path.write_text("".join(line + "\n" for line in kept))
    return path.open("a")


def load(config: Any, workdir: str | pathlib.Path) -> tuple[PolicyConfig, Any]:
    """The trained policy of `workdir`.

    Raises:
      FileNotFoundError: No checkpoint there.
    """
    folder = pathlib.Path(workdir).resolve() / "checkpoints"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; run train.py with this --workdir first")
    shape, _, state = _start(config)
    with ocp.CheckpointManager(folder) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise FileNotFoundError(f"{folder} holds no checkpoint")
        return shape, checkpoints.restore(step, args=ocp.args.StandardRestore(state)).params


def evaluate(config: Any, workdir: str | pathlib.Path) -> list[dict[str, Any]]:
    """Compares the trained policy with all tokens and random ones on fresh bags.

    Writes `report/table.json` and prints a table. `loss` is the reader's divergence in nats on the
    kept tokens; `correlation` is between K and the number of relevant tokens. Stop biases are
    calibrated on bags of their own.
    """
    shape, params = load(config, workdir)
    n, world = config.num_tokens, make_world(shape.feature_width)
    batch, validation = (
        draw_batch(key, world, config.eval.questions, n)
        for key in jax.random.split(jax.random.key(config.eval.seed))
    )

    def memory(batch):
        return policy.memory(params, policy.encode(params, shape, batch.image, batch.text))

    slots, margin = memory(batch), policy.select(params, shape, memory(validation)).margin
    noise = jax.random.uniform(jax.random.key(1), (config.eval.questions, n))
    rows = [_row("all tokens", "exact", world, batch, jnp.ones_like(noise, bool))]
    for budget in config.eval.budgets:
        rank = jnp.argsort(jnp.argsort(noise, axis=1), axis=1)
        rows.append(_row("random", "exact", world, batch, rank < budget))
        exact = policy.pick(params, shape, slots, budget=budget)
        rows.append(_row("StepPrune", "exact", world, batch, exact.selected))
        bias = policy.calibrate_stop_bias(margin, budget)
        adaptive = policy.pick(params, shape, slots, stop_bias=bias)
        rows.append(_row("StepPrune", "adaptive", world, batch, adaptive.selected))
    rows.append(_row("StepPrune, own stop", "adaptive", world, batch,
                     policy.pick(params, shape, slots).selected))  # fmt: skip
    report = pathlib.Path(workdir) / "report"
    report.mkdir(parents=True, exist_ok=True)
    (report / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"Toy: random features, toy loss. {config.eval.questions} fresh questions, {n} tokens")
    for row in rows:
        print("  ".join(f"{v:<20}" if isinstance(v, str) else f"{k} {v:6.3f}"
                        for k, v in row.items()))  # fmt: skip
    return rows


def _row(method: str, mode: str, world: World, batch: Batch, kept: Bool[Array, "b n"]):
    count = np.asarray(jnp.sum(kept, axis=1))
    varied = count.std() > 0
    relevant = np.asarray(batch.relevant)
    return {
        "method": method,
        "mode": mode,
        "mean_k": float(count.mean()),
        "loss": float(reader_loss(world, batch.image, kept, batch)),
        "correlation": float(np.corrcoef(count, relevant)[0, 1]) if varied else 0.0,
    }
