"""Validation of a policy during training, on a few held-out questions."""

import time
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from stepprune_jax.benchmarks.folder import is_right
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.corpus import LengthLimits, make_row
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.evaluation.split import Split
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.dataset import Answers, Batching, batches, rank_all
from stepprune_jax.inference.encode import encode_questions
from stepprune_jax.inference.generate import Generator
from stepprune_jax.inference.programs import run_take
from stepprune_jax.inference.truncation import check_lengths
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import mesh_of, place_rows, to_host
from stepprune_jax.parallel.programs import jit_for_weights
from stepprune_jax.policy import Pruned
from stepprune_jax.policy.buckets import choose_bucket, fraction_ladder
from stepprune_jax.pruning import Budget
from stepprune_jax.selectors import Policy
from stepprune_jax.selectors.calibration import StopCounts, describe_counts
from stepprune_jax.selectors.diagnosis import (
    ALL,
    NONE,
    OTHER_QUESTION,
    POLICY,
    RANDOM,
    cases,
    describe,
)
from stepprune_jax.training.batches import stack_targets
from stepprune_jax.training.language_loss import ForwardOptions, Targets, row_scores
from stepprune_jax.training.settings import Run

FOLDER = "overlays"

# The cases of a diagnosis, as they are named in a validation's row.
_CASES = {
    POLICY: "",
    ALL: "_all",
    NONE: "_none",
    RANDOM: "_random",
    OTHER_QUESTION: "_other_question",
}

_scores = jit_for_weights(row_scores, ("backbone", "options"))

# The loss of each question's correct answer, and whether every token of it is preferred.
Scores = tuple[Float[np.ndarray, " q"], Bool[np.ndarray, " q"]]


class Validation:
    """Validation on a fixed set of questions, for which the tower runs once.

    With several processes all must take part; each knows all results, and the main one draws.
    """

    def __init__(self, run: Run, model: VLM, split: Split, workdir: Path):
        """Runs the tower and tokenises the questions."""
        self._settings, self._model, self._split = run.validation, model, split
        self._folder, self._size = workdir / FOLDER, run.batch_size
        execution, n = run.model.execution, model.config.max_image_tokens
        self._encoded = encode_questions(
            model, split.questions, batch_size=self._size, execution=execution
        )
        self._targets = self._read_answers()
        prompts = self._encoded.prompts._replace(length=self._targets.length)  # with the answers
        check_lengths(prompts, self._encoded.sizes[:, None], model.backbone.CONTEXT_LIMIT)
        self._batching = Batching(self._size, fraction_ladder(n))
        self._run = RunOptions(self._settings.max_new_tokens, execution=execution)
        self._options = ForwardOptions(execution, mesh=mesh_of(model.params))
        real = np.arange(n) < self._encoded.sizes[:, None]
        noise = np.random.default_rng(0).random(real.shape)
        self._random = np.argsort(np.where(real, noise, 2), axis=1)  # padding is last
        self._fixed: dict[str, Scores] = {}

    def _read_answers(self) -> Targets:
        """Returns the questions with their correct answers."""
        backbone = self._model.backbone
        encoder = ConversationEncoder(
            self._model.tokenizer, backbone.place_images, backbone.conversation
        )
        limits = LengthLimits(image_tokens=0, context=1 << 31, policy_text=0)  # the whole answers
        rows = [
            make_row(encoder.encode((question.text, right), 1), limits)
            for question, right in zip(self._split.questions, self._split.answers, strict=True)
        ]
        longest = max(len(row.ids) for row in rows)
        grid = self._encoded.images.grid[self._encoded.prompts.image_of[:, 0]]
        return stack_targets(rows, grid, longest, max(len(row.target) for row in rows))

    def __call__(
        self, step: int, policy: Policy, entropy: float, recipe: str = ""
    ) -> dict[str, float | int]:
        """Answers the questions from the policy's kept tokens, and draws a few.

        A finding may need the `entropy` of the policy's choices in training, and the recipe.
        """
        begin = time.perf_counter()
        answers = self.answer(policy)
        count = answers.kept
        right = np.array(list(map(is_right, answers.texts, self._split.answers)))
        found = self._compare(policy, answers)
        read = policy.config.text_width  # else another question changes nothing
        losses = {case: loss for case, (loss, _) in found.items() if read or case != OTHER_QUESTION}
        stops = self._stops(policy, count)
        diagnosis = describe(
            round(float(count.mean())), losses, entropy, recipe=recipe, stops=stops
        )
        for finding in diagnosis.findings:
            distributed.say(f"validation at step {step}: {finding}")
        if self._settings.overlays and distributed.is_main():
            self._draw(self._folder / f"step_{step:08d}.png", answers, right)
        supervised, row = self._targets.supervised.sum(), {"step": step}
        for case, name in _CASES.items():
            loss, told = found[case]
            row[f"loss{name}"] = float(loss.sum() / supervised)  # mean over supervised tokens
            told = right if case == POLICY else told
            row[f"accuracy{name}"] = round(100 * float(told.mean()), 2)
        return row | {
            "k_mean": float(count.mean()),
            "k_std": float(count.std()),
            "k_min": int(count.min()),
            "k_max": int(count.max()),
            "questions": len(count),
            "seconds": round(time.perf_counter() - begin, 2),
        }

    def _stops(self, policy: Policy, count: Int[np.ndarray, " q"]) -> StopCounts | None:
        """Summarizes the counts of a learned stop; None if a budget determines them."""
        if self._settings.budget or not policy.has_stop:
            return None
        sizes = self._encoded.sizes
        longest = np.array([min(size, policy.longest(size)) for size in sizes.tolist()])
        return describe_counts(count, np.minimum(policy.min_tokens, longest), longest, sizes)

    def answer(self, policy: Policy) -> Answers:
        """Answers from the tokens that a policy keeps, at its own stop or at the set budget."""
        (answers,) = self._generator(policy).answer_set(self._encoded, self._batching)
        return answers

    def _generator(self, policy: Policy) -> Generator:
        """A policy without a stop keeps a quarter of the tokens if no budget is set."""
        budget = self._settings.budget
        free = Budget("adaptive") if policy.has_stop else Budget("rate", Fraction(1, 4))
        kept = Budget("count", budget) if budget else free
        return Generator(self._model, policy.with_budget(kept), options=self._run)

    def _compare(self, policy: Policy, answers: Answers) -> dict[str, Scores]:
        """Scores answers from a policy's tokens and from others, by the cases of a diagnosis."""
        prompts, images = self._encoded.prompts, self._encoded.images
        words, number = (np.roll(x, 1, axis=0) for x in (prompts.words, prompts.num_words))
        pruner = self._generator(policy).placed
        schedule = pruner.schedule(self._model.config, self._random.shape[1])
        other, _ = rank_all(
            self._model,
            pruner,
            prompts._replace(words=words, num_words=number),
            images,
            steps=schedule.enter or schedule.most,
            batch_size=self._size,
        )
        own = np.zeros((len(answers.kept), max(1, answers.kept.max(initial=0))), np.int32)
        for row, order in zip(own, answers.order, strict=True):
            row[: len(order)] = order
        chosen = cases(own, other.order, self._random, answers.kept, self._encoded.sizes)
        # No policy changes the first two.
        found = {case: self._fixed.get(case) or self.scores(*x) for case, x in chosen.items()}
        self._fixed = {case: found[case] for case in (ALL, NONE)}
        return found

    def scores(self, order: Int[np.ndarray, "q t"], kept: Int[np.ndarray, " q"]) -> Scores:
        """Computes the summed cross-entropy of each correct answer after kept tokens, in nats.

        Also whether each of its tokens is the most probable one. The tokens kept of each question's
        image are the first of its order.
        """
        scores, features = [], self._encoded.images.features
        image_of, mesh = self._encoded.prompts.image_of[:, 0], self._options.mesh
        for rows, real in batches(len(image_of), self._size):
            count = kept[rows].astype(np.int32)
            capacity = choose_bucket(count, self._batching.sizes)
            targets = jax.tree.map(lambda part, rows=rows: part[rows], self._targets)
            shown, first, count, targets = place_rows(
                mesh, (features[image_of[rows]], order[rows], count, targets)
            )
            taken = run_take(shown, first, count, capacity=capacity)
            of_rows = _scores(
                self._model.params,
                backbone=self._model.backbone,
                options=self._options,
                kept=Pruned(taken.index, taken.tokens, taken.valid, taken.count),
                targets=targets,
            )
            scores.append([x[:real] for x in to_host(of_rows)])
        losses, right = map(np.concatenate, zip(*scores, strict=True))
        return losses, right

    def _draw(self, path: Path, answers: Answers, right: Bool[np.ndarray, " q"]) -> None:
        """Draws the first few questions."""
        # Imported here: it imports matplotlib, which a run without overlays does not need.
        from stepprune_jax.visualize.overlays import Overlay, draw_rows, format_answer
        from stepprune_jax.visualize.patches import square_patches

        shown, images, backbone = [], self._encoded.images, self._model.backbone
        for i in range(min(self._settings.overlays, len(answers.texts))):
            question, image = self._split.questions[i], self._encoded.prompts.image_of[i, 0]
            grid = tuple(images.grid[image].tolist())
            shown.append(
                Overlay(
                    image=question.image,
                    patches=square_patches(backbone.token_cells(grid, answers.order[i]), grid),
                    title=f"K = {answers.kept[i]}",
                    category=question.category,
                    text=question.text,
                    answer=format_answer(answers.texts[i], self._split.answers[i], bool(right[i])),
                    is_correct=bool(right[i]),
                    grid=max(grid),
                )
            )
        draw_rows(path, [shown])
