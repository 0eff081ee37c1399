r"""Tells whether a decoder can follow a path when it is shown the path: experiments/RESULTS.md.

    python -m experiments.shapes --out data/pretrain_shapes_hard --train 12000 --validation 0 \
        --test 0 --seed 1000 --emphasis 2 --patches --level 2
    python -m experiments.pretrain --config experiments/configs/pretrain_shapes_hard.py \
        --config.tower.steps=560 --config.language.steps=2 --config.language.whole_steps=1 \
        --config.noise.steps=2
    python -m experiments.shapes --out data/paths --level 2 --train 0 --validation 3000 --test 200
    python -m experiments.studies.imitation --config experiments/configs/shapes_hard.py \
        --steps 1000 --set data.folder=data/paths --json imitation.json

Questions of the second level whose answer is at the end of a path are learned from the patches of
the path, in their order, instead of from a language model's loss. The pointer learns each next one
by cross-entropy, given those before it; the scorer all of them at once. What is reported is the
share of questions of which every patch of the path is among the first tokens. So the objective is
out of the comparison, and what is left is what an architecture can express and learn. Only the
tower of the model is used.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int
from tqdm import trange

from experiments.datasets.scenes import read_scenes
from experiments.report.statistics import families
from experiments.studies.command import read_study, study_parser
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.command_line import exit_with
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.cells import markdown_rows
from stepprune_jax.evaluation.encode import encode_chunks
from stepprune_jax.evaluation.generate_stage import load_model
from stepprune_jax.evaluation.split import read_split
from stepprune_jax.inference.pipeline import see
from stepprune_jax.inference.sets import batches
from stepprune_jax.parallel.placement import fetch
from stepprune_jax.policy import (
    POINTER,
    FeatureStats,
    Inputs,
    Limits,
    PolicyConfig,
    encode,
    layers,
    update_stats,
)
from stepprune_jax.policy.encoder import memory
from stepprune_jax.policy.params import ParamSpec, draw_params, param_specs
from stepprune_jax.policy.rollout import start_episode
from stepprune_jax.pruning import AutoSelect, method_of
from stepprune_jax.training import Run
from stepprune_jax.training.optimizer import make_optimizer
from stepprune_jax.training.settings import read_method
from stepprune_jax.user_input import user_input

PATHS = ("one step", "two steps", "three steps")
LONGEST, WORDS = 4, 32  # patches of the longest path, and words of a question
BUDGETS = (4, 8)
BATCH = 64


class Paths(NamedTuple):
    """Questions with the patches of their paths, in order; -1 behind the last."""

    features: Float[np.ndarray, "i n d"]
    image_of: Int[np.ndarray, "q"]
    text: Float[np.ndarray, "q l e"]
    words: Bool[np.ndarray, "q l"]
    path: Int[np.ndarray, "q 4"]

    def inputs(self, rows: np.ndarray, stats: FeatureStats) -> Inputs:
        """Returns what a selector sees of some questions."""
        image = self.features[self.image_of[rows]]
        return Inputs(image, self.text[rows], None, self.words[rows], stats)


def read_paths(model: VLM, split: str, run: Run, config: PolicyConfig) -> Paths:
    """Encodes the questions of a split that follow paths."""
    folder = Path(run.data.folder)
    asked = read_split(folder, split).questions
    scenes = read_scenes(folder / f"{split}_scenes.jsonl", asked)
    of_path = np.any([families(asked)[name] for name in PATHS], axis=0)
    chosen = np.flatnonzero(of_path)
    pruner = method_of(config)  # any that reads the question
    questions = [asked[i] for i in chosen]
    chunks = encode_chunks(model, questions, batch_size=BATCH, execution=run.model.execution)
    features, image_of, text, words, before = [], [], [], [], 0
    for _, encoded in chunks:
        for rows, count in batches(len(encoded.prompts.length), BATCH):
            view = see(model, pruner, encoded.prompts.take(rows), encoded.images)
            text.append(_widen(np.asarray(fetch(view.text))[:count]))
            words.append(_widen(np.asarray(fetch(view.text_valid))[:count]))
        features.append(np.asarray(encoded.images.features))
        image_of.append(encoded.prompts.image_of[:, 0] + before)
        before += len(features[-1])
    path = np.full((len(chosen), LONGEST), -1, np.int32)
    for row, i in zip(path, chosen, strict=True):
        row[: len(scenes[i].relevant)] = scenes[i].relevant
    return Paths(*map(np.concatenate, (features, image_of, text, words)), path)


def _widen(words: np.ndarray) -> np.ndarray:
    """Pads the words of questions to `WORDS`."""
    return np.pad(words, ((0, 0), (0, WORDS - words.shape[1]), *[(0, 0)] * (words.ndim - 2)))


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """What is trained.

    Attributes:
        config: shape of the encoder and of the decoder.
        specs: table of its weights.
        logits: (params, config, inputs, path) -> a row of logits for each patch of the path, which
            may depend on those before it.
    """

    config: PolicyConfig
    specs: dict[str, Any]
    logits: Callable[..., Float[Array, "b t n"]]


def one_shot(params, config, inputs: Inputs, path) -> Float[Array, "b t n"]:
    """Scores every token once."""
    encoded = layers.layer_norm(params["head"]["norm"], encode(params, config, inputs))
    scores = layers.dense(params["head"], encoded)[..., 0]
    return jnp.broadcast_to(scores[:, None], (*path.shape, scores.shape[-1]))


def step_by_step(params, config, inputs: Inputs, path) -> Float[Array, "b t n"]:
    """Points at each patch, given those before it."""
    slots = memory(params, encode(params, config, inputs))
    episode = start_episode(params, config, slots, limits=Limits(max_steps=path.shape[1]))
    earlier = jnp.take_along_axis(slots, jnp.maximum(path[:, :-1], 0)[..., None], axis=1)
    queries = jnp.concatenate([episode.query[:, None], earlier], axis=1)
    if "question" in params:
        queries = read_question(params["question"], config, queries, inputs)
    given = (episode.context, queries, episode.cache)
    return POINTER.sequence(params, config, *given)[..., :-1]


def read_question(params, config, queries, inputs: Inputs) -> Float[Array, "b t d"]:
    """Lets every step read the words of the question once more, by cross-attention."""
    words = layers.layer_norm(params["words"], layers.dense(params["text"], inputs.text))
    x, heads = layers.layer_norm(params["norm"], queries), config.num_heads
    q, k, v = (
        layers.split_heads(layers.dense(params[name], seen), heads)
        for name, seen in (("query", x), ("key", words), ("value", words))
    )
    mixed = layers.merge_heads(layers.attention(q, k, v, inputs.text_mask[:, None, None]))
    return queries + layers.dense(params["out"], mixed)


def learners(config: PolicyConfig) -> dict[str, Learner]:
    """Returns the architectures that are compared."""
    config = dataclasses.replace(config, first_query="learned")  # only the memory is read
    d, e = config.policy_width, config.text_width

    def dense(rows: int, columns: int):
        return {"kernel": ParamSpec((rows, columns), (None, None), "fan_in")}

    norm = {"scale": ParamSpec((d,), (None,), "ones")}
    question = {name: dense(d, d) for name in ("query", "key", "value", "out")}
    question |= {"text": dense(e, d), "words": norm, "norm": norm}
    deep = dataclasses.replace(config, encoder_layers=4)
    head = dense(d, 1) | {"norm": norm}
    scorer = {"encoder": param_specs(deep)["encoder"], "head": head}
    return {
        "scorer": Learner(deep, scorer, one_shot),
        "pointer": Learner(config, param_specs(config), step_by_step),
        "pointer that reads the question": Learner(
            config, param_specs(config) | {"question": question}, step_by_step
        ),
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def update(learner: Learner, tx: Any, params, state, step, inputs: Inputs, path):
    """Makes an update with the mean cross-entropy of a path's patches."""

    def loss(params):
        logits = learner.logits(params, learner.config, inputs, path).astype(jnp.float32)
        if learner.logits is step_by_step:  # those before are out of reach
            logits = jnp.where(_earlier(path, logits.shape[-1]), layers.MASKED, logits)
        known = path >= 0
        given = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(path, 0))
        return jnp.sum(jnp.where(known, given, 0)) / jnp.sum(known)

    value, gradient = jax.value_and_grad(loss)(params)
    changes, state = tx.update(gradient, state, params, step=step)
    return optax.apply_updates(params, changes), state, value


def _earlier(path: Int[Array, "b t"], n: int) -> Bool[Array, "b t n"]:
    """Returns which tokens stand in a path before each of its places."""
    seen = jax.nn.one_hot(path, n)
    return jnp.cumsum(seen, axis=1) - seen > 0


@functools.partial(jax.jit, static_argnums=(0, 3))
def order(learner: Learner, params, inputs: Inputs, steps: int) -> Int[Array, "b t"]:
    """Returns the first tokens that a learner keeps, best first."""

    def step(path, t):
        logits = learner.logits(params, learner.config, inputs, path)[:, t]
        taken = jnp.any((path[..., None] == jnp.arange(logits.shape[-1])), axis=1)
        best = jnp.argmax(jnp.where(taken, layers.MASKED, logits), axis=-1)
        return path.at[:, t].set(best), None

    start = jnp.full((inputs.image.shape[0], steps), -1, jnp.int32)
    return jax.lax.scan(step, start, jnp.arange(steps))[0]


def learn(
    learner: Learner, run: Run, steps: int, train: Paths, test: Paths, stats
) -> list[np.ndarray]:
    """Trains an architecture; returns the first tokens that it keeps for the test's questions."""
    params = draw_params(jax.random.key(run.seed), learner.specs)
    tx = make_optimizer(run.optimizer, steps, AutoSelect(config=run.autoselect))
    state, random = tx.init(params), np.random.default_rng(run.seed)
    for number in (bar := trange(steps, mininterval=10)):
        rows = random.integers(len(train.path), size=BATCH)
        given = (number, train.inputs(rows, stats), train.path[rows])
        params, state, loss = update(learner, tx, params, state, *given)
        if number % 100 == 0:
            bar.set_postfix(loss=f"{float(loss):.3f}")
    found = []
    for rows, count in batches(len(test.path), BATCH):
        kept = order(learner, params, test.inputs(rows, stats), max(BUDGETS))
        found.append(np.asarray(kept)[:count])
    return np.concatenate(found)


def followed(order: Int[np.ndarray, "q t"], path: Int[np.ndarray, "q 4"]) -> dict[str, float]:
    """Computes how many paths are kept whole, in percent, by steps and budget."""
    shares = {}
    for patches, name in enumerate(PATHS, start=2):
        here = (path >= 0).sum(axis=1) == patches
        for budget in (patches, *BUDGETS):
            kept = (path[here][..., None] == order[here][:, None, :budget]).any(axis=-1)
            whole = (kept | (path[here] < 0)).all(axis=1)
            label = "path" if budget == patches else budget
            shares[f"{name}, {label}"] = round(100 * float(whole.mean()), 1)
    return shares


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = study_parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="updates of each")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args(argv)
    with user_input():
        run, json_file = read_study(options)
        model = load_model(run)
        config = read_method(run, model.config).config
        train, test = (read_paths(model, name, run, config) for name in ("validation", "test"))
    stats = update_stats(
        FeatureStats.start(config.feature_width), jnp.asarray(train.features[:500])
    )
    rows = []
    for name, learner in learners(config).items():
        kept = learn(learner, run, options.steps, train, test, stats)
        rows.append({"learner": name, "seed": run.seed} | followed(kept, test.path))
        print(rows[-1], flush=True)
    if json_file:
        write_json(json_file, {"steps": options.steps, "rows": rows})
    print(markdown_rows(list(rows[0]), [list(row.values()) for row in rows]), end="")


if __name__ == "__main__":
    exit_with("experiments.studies.imitation", main)
