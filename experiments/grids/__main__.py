r"""Trains a policy on questions about grids, which no recipe was tuned on.

    python -m experiments.grids --workdir runs/grids --kinds place,compare,count

The first run trains the reader that stands in for a frozen model, and keeps it in the folder. Each
run then prints what the reader answers with all tokens, with the needed tokens, and with the tokens
that the policy keeps, and the processor time.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

import stepprune_jax as sp
from experiments.grids.reader import (
    MODEL_WIDTH,
    Weights,
    answer_logits,
    answer_losses,
    embed_words,
    load_reader,
    project,
    report_reader,
    save_reader,
    train_reader,
)
from experiments.grids.world import KINDS, WIDTH, Grid, Questions, sample_questions
from stepprune_jax.cli.command_line import exit_with
from stepprune_jax.selectors import RlooSettings
from stepprune_jax.selectors.rloo import SubsetGain
from stepprune_jax.training.recipes import GATE_SHARE, TRIAL_SHARE, first_objective

BATCH_SIZE, BUDGETS, NUM_TEST_QUESTIONS = 32, (2, 4, 8, 16), 1024
# Price of a kept token by RLOO, four times the gate's; see `training.recipes`.
RLOO_PRICE = 0.6
RECIPES = ("auto", "warm_start", "rloo", "gate", "gate_rloo")
NUM_TRIED_QUESTIONS = 512  # questions on which the recipe "auto" measures what subsets gain
# Updates, cells and batch size of each stage of the reader's training; 0 selects all cells.
READER_STAGES = ((2500, 24, 96), (500, 60, 64), (900, 0, 48))


class Study:
    """Data, frozen reader and policy of a run.

    Attributes:
        arguments: parsed command line.
        kinds: kinds of questions.
        grid: size of the grids.
        settings: settings of RLOO.
        reader: weights of the frozen reader.
        policy: the policy before training.
    """

    def __init__(self, arguments: argparse.Namespace, reader: Weights):
        self.arguments, self.reader = arguments, reader
        self.kinds, self.grid = tuple(arguments.kinds.split(",")), Grid(arguments.side)
        self.settings = RlooSettings()
        width = MODEL_WIDTH if arguments.reads == "projected" else WIDTH
        # The price is that of RLOO; `policy_for` changes it for the gate.
        config = sp.PolicyConfig(
            length_weight=RLOO_PRICE,
            feature_width=width,
            text_width=MODEL_WIDTH,
            width=64,
            num_heads=4,
            draw=1.0,
        )
        stats = sp.FeatureStats.start(width)
        for batch_index in range(4):
            batch = self.sample(jax.random.key(100 + batch_index), 64)
            stats = sp.update_stats(stats, self.image(reader, batch))
        self.policy = sp.StepPrune.init(jax.random.key(arguments.seed + 1), config, stats)

    def policy_for(self, params: Any, objective: str) -> sp.StepPrune:
        """Returns the policy with some weights, and with the price of a token of an objective."""
        config = self.policy.config
        if objective == "gate":
            config = dataclasses.replace(config, length_weight=sp.PolicyConfig.length_weight)
        return self.policy.replace(params=params, config=config)

    def sample(self, key: Array, num_rows: int, kinds: tuple[str, ...] = ()) -> Questions:
        """Samples questions of some kinds, by default of all kinds of the study."""
        return sample_questions(key, self.grid, num_rows, kinds or self.kinds)

    def image(self, reader: Weights, batch: Questions) -> Float[Array, "b n d"]:
        """Returns the tokens that the policy reads: before or after the reader's projector."""
        return (
            project(reader, batch.tokens) if self.arguments.reads == "projected" else batch.tokens
        )

    def language_tokens(self, reader: Weights, tokens: Array) -> Array:
        """Maps tokens that the policy kept to the space of words."""
        return tokens if self.arguments.reads == "projected" else project(reader, tokens)

    def importance(self, reader: Weights, batch: Questions) -> Float[Array, "b n"]:
        """Returns the importance of each token for the reader's own answer."""
        image = self.image(reader, batch)

        def own_answer_losses(tokens):
            valid = jnp.ones(tokens.shape[:2], bool)
            logits = answer_logits(reader, self.language_tokens(reader, tokens), valid, batch.words)
            own_answer = jnp.argmax(logits, axis=-1)
            return optax.softmax_cross_entropy_with_integer_labels(logits, own_answer)

        return sp.token_importance(own_answer_losses, image, self.policy.stats.mean)

    def loss(
        self, policy: sp.Policy, reader: Weights, key: Array, objective: str, share: Array
    ) -> tuple[Array, Any]:
        """Computes the loss of a batch and its metrics.

        Args:
            policy: the policy with the weights to train.
            reader: weights of the frozen reader.
            key: PRNG key; consumed.
            objective: "warm_start", "rloo" or "gate".
            share: fraction of the updates that are done.
        """
        data_key, policy_key = jax.random.split(key)
        batch = self.sample(data_key, BATCH_SIZE)
        image, text = self.image(reader, batch), embed_words(reader, batch.words)
        masks = {"text_mask": batch.words >= 0}
        if objective == "warm_start":
            importance = self.importance(reader, batch)
            return policy.warm_start_loss(policy_key, image, text, importance, **masks)

        def losses_of(tokens, valid, words, answer):
            projected = self.language_tokens(reader, tokens)
            return answer_losses(reader, projected, valid, words, answer)[0]

        if objective == "gate":

            def mean_loss(tokens):
                valid = jnp.ones(tokens.shape[:2], bool)
                return losses_of(tokens, valid, batch.words, batch.answer).mean()

            progress = sp.Progress(share)
            return policy.train_loss(policy_key, image, text, mean_loss, progress=progress, **masks)

        subset_losses = self.subset_losses(reader, batch)
        return policy.rloo_loss(policy_key, image, text, subset_losses, self.settings, **masks)

    def subset_losses(self, reader: Weights, batch: Questions) -> Callable[[sp.Pruned], Array]:
        """Returns the function from [b, g] subsets to the loss of each question's answer."""

        def losses(kept):
            b, g = kept.count.shape
            flat = jax.tree.map(lambda leaf: leaf.reshape(b * g, *leaf.shape[2:]), kept)
            words, answer = (jnp.repeat(leaf, g, axis=0) for leaf in (batch.words, batch.answer))
            tokens = self.language_tokens(reader, flat.tokens)
            return answer_losses(reader, tokens, flat.valid, words, answer)[0].reshape(b, g)

        return losses

    def measure_subset_gain(self, params: Any) -> SubsetGain:
        """Measures the gain of subsets that the policy samples on held-out questions."""
        batch = self.sample(jax.random.key(5), NUM_TRIED_QUESTIONS)
        return self.policy.replace(params=params).measure_subset_gain(
            jax.random.key(6),
            self.image(self.reader, batch),
            embed_words(self.reader, batch.words),
            self.subset_losses(self.reader, batch),
            self.settings,
            text_mask=batch.words >= 0,
        )

    def choose_recipe(self) -> str:
        """Chooses a recipe by a trial, by the rule of the recipe "auto" of `training.run`."""
        gain = self.measure_subset_gain(self.policy.params)
        num_updates = max(1, round(TRIAL_SHARE * self.arguments.updates))
        params = self.train(self.policy.params, "warm_start", num_updates)
        trial = self.measure_subset_gain(params)
        begin = first_objective(gain, trial)
        recipe = "gate_rloo" if begin == "gate" else begin
        print(f"auto: {recipe}; {gain.summary}; after the trial: {trial.rewards}", flush=True)
        return recipe

    def train(self, params: Any, objective: str, num_updates: int) -> Any:
        """Trains the weights of the policy by one objective, and prints metrics.

        Args:
            params: weights of the policy.
            objective: "warm_start", "rloo" or "gate".
            num_updates: number of updates, over which the learning rate falls by a cosine.
        """
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, 1e-3, num_updates // 20, num_updates, 1e-4
        )
        clip = optax.clip_by_global_norm(1.0)
        optimizer = optax.chain(clip, optax.adamw(schedule, weight_decay=1e-4))

        @jax.jit
        def update(params, moments, reader, key, share):
            def loss_fn(params):
                policy = self.policy_for(params, objective)
                return self.loss(policy, reader, key, objective, share)

            (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
            updates, moments = optimizer.update(grads, moments, params)
            return optax.apply_updates(params, updates), moments, aux.metrics | {"loss": loss}

        moments = optimizer.init(params)
        objective_key = jax.random.fold_in(jax.random.key(self.arguments.seed), len(objective))
        for step in range(num_updates):
            key, share = jax.random.fold_in(objective_key, step), step / num_updates
            params, moments, metrics = update(params, moments, self.reader, key, share)
            if step % 50 == 0 or step == num_updates - 1:
                figures = {name: round(float(value), 3) for name, value in metrics.items()}
                print(f"{objective} {step}: {time.process_time():.0f} s {figures}", flush=True)
        return params

    def report(self, title: str, keep: Callable[[Questions], tuple[Array, Array, Array]]) -> None:
        """Prints the accuracy on held-out questions of each kind.

        Args:
            title: name of the tokens that are kept.
            keep: maps questions to kept tokens, in the space of words, with a mask and counts.
        """

        @jax.jit
        def measure(reader, tokens, valid, words, answer):
            return answer_losses(reader, tokens, valid, words, answer)[1].mean()

        for kind in self.kinds:
            batch = self.sample(jax.random.key(7), NUM_TEST_QUESTIONS, (kind,))
            tokens, valid, count = keep(batch)
            accuracy = measure(self.reader, tokens, valid, batch.words, batch.answer)
            print(f"{title}, {kind}: {100 * accuracy:.1f} % with {count.mean():.1f}", flush=True)

    def report_reference(self) -> None:
        """Prints the accuracy with all tokens, and with the needed tokens among 8 random ones."""

        def keep_all(batch):
            projected = project(self.reader, batch.tokens)
            valid = jnp.ones(projected.shape[:2], bool)
            return projected, valid, valid.sum(axis=1)

        self.report("all tokens", keep_all)
        for budget in BUDGETS:
            for title, wants in (("needed", 2.0), ("random", 0.0)):

                def keep_best(batch, wants=wants, budget=budget):
                    noise = jax.random.uniform(jax.random.key(1), batch.filled.shape)
                    score = wants * batch.needed + batch.filled * noise
                    index = jnp.argsort(-score, axis=1)[:, :budget]
                    tokens = jnp.take_along_axis(batch.tokens, index[..., None], axis=1)
                    valid = jnp.ones(index.shape, bool)
                    return project(self.reader, tokens), valid, valid.sum(axis=1)

                self.report(f"{title} filled cells", keep_best)

    def report_policy(self, title: str, params: Any, group: int) -> None:
        """Prints the accuracy with the tokens that the policy keeps, by budget and by its stop.

        Args:
            title: name of the policy.
            params: weights of the policy.
            group: number of tokens that the policy takes per step.
        """
        for budget in (*BUDGETS, "adaptive"):
            policy = self.policy.replace(params=params, group=group).with_budget(budget)

            def keep(batch, policy=policy):
                image, text = self.image(self.reader, batch), embed_words(self.reader, batch.words)
                pruned = policy.prune(image, text, text_mask=batch.words >= 0)
                tokens = self.language_tokens(self.reader, pruned.tokens)
                return tokens, pruned.valid, pruned.count

            self.report(f"{title}, {group} a step, {budget}", keep)


def phases(recipe: str, num_updates: int, warm_share: float) -> list[tuple[str, int]]:
    """Returns the objectives of a recipe with their numbers of updates.

    Args:
        recipe: "warm_start", "rloo", "gate" or "gate_rloo"; the first and the last end with RLOO.
        num_updates: number of all updates.
        warm_share: fraction of the updates that belong to the warm start.
    """
    shares = {"warm_start": warm_share, "gate_rloo": GATE_SHARE}
    if recipe not in shares:
        return [(recipe, num_updates)]
    num_first_updates = round(shares[recipe] * num_updates)
    first_objective = recipe.removesuffix("_rloo")
    return [(first_objective, num_first_updates), ("rloo", num_updates - num_first_updates)]


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.grids")
    parser.add_argument("--workdir", type=Path, default=Path("runs/grids"))
    parser.add_argument("--kinds", default="place,compare,count", help=", ".join(KINDS))
    parser.add_argument("--side", type=int, default=12, help="rows and columns of a grid")
    parser.add_argument("--recipe", choices=RECIPES, default="auto")
    parser.add_argument("--reads", choices=("tower", "projected"), default="tower")
    parser.add_argument("--updates", type=int, default=700)
    parser.add_argument("--share", type=float, default=0.4, help="of the warm start")
    parser.add_argument(
        "--answer_groups", type=int, nargs="+", default=[1], help="tokens per step, in reports"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Trains the reader if it is missing, then a policy."""
    arguments = parse_arguments()
    grid, kinds = Grid(arguments.side), tuple(arguments.kinds.split(","))
    path = arguments.workdir / f"reader-{arguments.side}-{'-'.join(kinds)}.npz"
    if not path.exists():
        save_reader(train_reader(grid, kinds, READER_STAGES), path)
    reader = load_reader(path, grid)
    report_reader(reader, grid, kinds)
    study = Study(arguments, reader)
    study.report_reference()
    recipe = arguments.recipe
    if recipe == "auto":
        recipe = study.choose_recipe()
    params = study.policy.params
    for objective, num_updates in phases(recipe, arguments.updates, arguments.share):
        params = study.train(params, objective, num_updates)
        for group in arguments.answer_groups:
            study.report_policy(objective, params, group)


if __name__ == "__main__":
    exit_with("experiments.grids", main)
