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
from stepprune_jax.data.llava import Question
from stepprune_jax.data.llava import read_questions as read_question_file
from stepprune_jax.evaluation.split import Split, read_split, spread_over, thin
from stepprune_jax.extras import need
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
from stepprune_jax.policy.base import AnyArray
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
from stepprune_jax.training.step_config import StepConfig
from stepprune_jax.user_input import UserError, local_path

FOLDER = "overlays"

# Suffixes of the fields of a row of validation.jsonl, by case of the diagnosis.
_SUFFIXES = {
    POLICY: "",
    ALL: "_all",
    NONE: "_none",
    RANDOM: "_random",
    OTHER_QUESTION: "_other_question",
}

_run_scores = jit_for_weights(row_scores, ("backbone", "options"))

# Loss of each question's correct answer, and whether every token of the answer is the most
# probable one.
Scores = tuple[Float[np.ndarray, " q"], Bool[np.ndarray, " q"]]


def read_questions(run: Run, config: StepConfig) -> Split | None:
    """Reads the validation questions of a run, before weights are loaded.

    Args:
        run: settings of the run.
        config: static part of the updates.

    Returns:
        The questions with their answers; None if the run has no validation.

    Raises:
        UserError: a validation setting that the model or the policy cannot meet, or no folder.
    """
    settings, model = run.validation, config.backbone.config
    if not settings.every:
        return None
    if settings.overlays:
        need("matplotlib", "config.validation.overlays, which draws, is not 0")
    max_kept = config.selector.longest(model.max_image_tokens)
    if settings.budget > max_kept:
        raise UserError(
            f"config.validation.budget is {settings.budget}, expected at most {max_kept}"
        )
    max_positions = model.text.max_positions
    expected = f"at most {max_positions}, the positions that the model was trained with"
    fits_model = settings.max_new_tokens <= max_positions
    settings.expect("max_new_tokens", fits_model, expected)
    folder = _find_folder(run)
    if folder is None:
        raise UserError("config.validation.folder is empty, expected one with validation.jsonl")
    return thin(read_split(folder, "validation"), settings.questions)


def read_calibration_questions(run: Run) -> list[Question]:
    """Reads the questions on which the stop of the trained policy is calibrated.

    Returns:
        The questions, spread over the validation split; none if there is no such split.
    """
    folder, limit = _find_folder(run), run.validation.calibrate
    if not limit or folder is None or not (file := folder / "validation.jsonl").is_file():
        return []
    try:
        questions = read_question_file(file, folder / "images")
    except (OSError, UserError) as error:
        hint = "config.validation.calibrate=0 skips the file"
        raise UserError(f"{error}; {hint}") from error
    return [questions[index] for index in spread_over(len(questions), limit)]


def _find_folder(run: Run) -> Path | None:
    """Returns the folder of the validation split; None if no folder of validation or data is set.

    Raises:
        FileNotFoundError: the folder of the validation settings does not exist.
    """
    name = run.validation.folder or run.data.folder
    folder = local_path(name)
    if run.validation.folder and not folder.is_dir():
        raise FileNotFoundError(f"config.validation.folder: no folder {folder}")
    return folder if name else None


class Validation:
    """Validation on a fixed set of questions, whose images pass through the tower once.

    With several processes, all must take part. Each process has all results, and the main process
    draws.
    """

    def __init__(self, run: Run, model: VLM, split: Split, workdir: Path):
        """Encodes the images and tokenizes the questions.

        Args:
            run: settings of the run.
            model: the frozen model.
            split: the questions with their answers.
            workdir: folder of the run.
        """
        self._settings, self._model, self._split = run.validation, model, split
        self._folder, self._batch_size = workdir / FOLDER, run.batch_size
        execution, n = run.model.execution, model.config.max_image_tokens
        self._encoded = encode_questions(
            model, split.questions, batch_size=self._batch_size, execution=execution
        )
        self._targets = self._encode_answers()
        # The lengths are checked with the answers.
        prompts = self._encoded.prompts._replace(length=self._targets.length)
        check_lengths(prompts, self._encoded.sizes[:, None], model.backbone.CONTEXT_LIMIT)
        self._sizes = fraction_ladder(n)
        self._run_options = RunOptions(self._settings.max_new_tokens, execution=execution)
        self._forward_options = ForwardOptions(execution, mesh=mesh_of(model.params))
        is_real = np.arange(n) < self._encoded.sizes[:, None]
        noise = np.random.default_rng(0).random(is_real.shape)
        self._random_order = np.argsort(np.where(is_real, noise, 2), axis=1)  # padding is last
        self._fixed_scores: dict[str, Scores] = {}  # of the cases that no policy changes

    def _encode_answers(self) -> Targets:
        """Encodes the questions with their correct answers."""
        backbone = self._model.backbone
        encoder = ConversationEncoder(
            self._model.tokenizer, backbone.place_images, backbone.conversation
        )
        # No limit, so that no answer loses its end.
        limits = LengthLimits(image_tokens=0, context=1 << 31, policy_text=0)
        rows = [
            make_row(encoder.encode((question.text, answer), 1), limits)
            for question, answer in zip(self._split.questions, self._split.answers, strict=True)
        ]
        max_ids = max(len(row.ids) for row in rows)
        grid = self._encoded.images.grid[self._encoded.prompts.image_of[:, 0]]
        return stack_targets(rows, grid, max_ids, max(len(row.target) for row in rows))

    def __call__(
        self, step: int, policy: Policy, entropy: float, recipe: str = ""
    ) -> dict[str, float | int]:
        """Answers the questions from the tokens that the policy keeps, and draws a few.

        Findings of the diagnosis are logged.

        Args:
            step: number of updates done.
            policy: the policy.
            entropy: entropy of the policy's choices in training, for the diagnosis.
            recipe: name of the objective that trains the policy, for advice on another
                recipe; empty for no advice.

        Returns:
            A row of validation.jsonl.
        """
        start_time = time.perf_counter()
        answers = self.answer(policy)
        count = answers.kept
        is_correct = np.array(list(map(is_right, answers.texts, self._split.answers)))
        scores = self._score_cases(policy, answers)
        self._diagnose(policy, count, scores, step=step, entropy=entropy, recipe=recipe)
        if self._settings.overlays and distributed.is_main():
            self._draw(self._folder / f"step_{step:08d}.png", answers, is_correct)
        num_supervised = self._targets.supervised.sum()
        row: dict[str, float | int] = {"step": step}
        for case, suffix in _SUFFIXES.items():
            loss, is_case_correct = scores[case]
            row[f"loss{suffix}"] = float(loss.sum() / num_supervised)
            is_case_correct = is_correct if case == POLICY else is_case_correct
            row[f"accuracy{suffix}"] = round(100 * float(is_case_correct.mean()), 2)
        return row | {
            "k_mean": float(count.mean()),
            "k_std": float(count.std()),
            "k_min": int(count.min()),
            "k_max": int(count.max()),
            "questions": len(count),
            "seconds": round(time.perf_counter() - start_time, 2),
        }

    def _diagnose(
        self,
        policy: Policy,
        count: Int[np.ndarray, " q"],
        scores: dict[str, Scores],
        *,
        step: int,
        entropy: float,
        recipe: str,
    ) -> None:
        """Logs the findings of a diagnosis of the scores; other arguments as in `__call__`."""
        # A policy that does not read the question keeps the same tokens for another question.
        reads_text = bool(policy.config.text_width)
        losses = {
            case: loss for case, (loss, _) in scores.items() if reads_text or case != OTHER_QUESTION
        }
        stops = self._count_stops(policy, count)
        budget = round(float(count.mean()))
        diagnosis = describe(budget, losses, entropy, recipe=recipe, stops=stops)
        for finding in diagnosis.findings:
            distributed.say(f"validation at step {step}: {finding}")

    def _count_stops(self, policy: Policy, count: Int[np.ndarray, " q"]) -> StopCounts | None:
        """Summarizes the counts of a learned stop; None if a budget determines the counts."""
        if self._settings.budget or not policy.has_stop:
            return None
        sizes = self._encoded.sizes
        max_counts = np.array([min(size, policy.longest(size)) for size in sizes.tolist()])
        min_counts = np.minimum(policy.min_tokens, max_counts)
        return describe_counts(count, min_counts, max_counts, sizes)

    def answer(self, policy: Policy) -> Answers:
        """Answers from the tokens that a policy keeps, at its learned stop or at the set budget."""
        batching = Batching(self._batch_size, self._sizes)
        (answers,) = self._make_generator(policy).answer_set(self._encoded, batching)
        return answers

    def _make_generator(self, policy: Policy) -> Generator:
        """Returns a generator for the set budget.

        Without a set budget, a policy uses its learned stop. A policy that has no stop keeps a
        quarter of the tokens.
        """
        count = self._settings.budget
        if count:
            budget = Budget("count", count)
        else:
            budget = Budget("adaptive") if policy.has_stop else Budget("rate", Fraction(1, 4))
        return Generator(self._model, policy.with_budget(budget), options=self._run_options)

    def _score_cases(self, policy: Policy, answers: Answers) -> dict[str, Scores]:
        """Scores the correct answers, given the tokens of each case of a diagnosis."""
        prompts, images = self._encoded.prompts, self._encoded.images
        words, num_words = (np.roll(x, 1, axis=0) for x in (prompts.words, prompts.num_words))
        pruner = self._make_generator(policy).placed
        assert isinstance(pruner, Policy)  # the same policy, on the model's devices
        schedule = pruner.schedule(self._model.config, self._random_order.shape[1])
        other_answers, _ = rank_all(
            self._model,
            pruner,
            prompts._replace(words=words, num_words=num_words),
            images,
            steps=schedule.enter or schedule.most,
            batch_size=self._batch_size,
        )
        num_questions, max_count = len(answers.kept), max(1, answers.kept.max(initial=0))
        policy_order = np.zeros((num_questions, max_count), np.int32)
        for row, order in zip(policy_order, answers.order, strict=True):
            row[: len(order)] = order
        chosen = cases(
            policy_order,
            other_answers.order,
            self._random_order,
            answers.kept,
            self._encoded.sizes,
        )
        scores = {
            case: self._fixed_scores.get(case) or self.scores(*order_and_count)
            for case, order_and_count in chosen.items()
        }
        self._fixed_scores = {case: scores[case] for case in (ALL, NONE)}
        return scores

    def scores(self, order: Int[AnyArray, "q t"], count: Int[AnyArray, " q"]) -> Scores:
        """Computes the summed cross-entropy of each correct answer given kept tokens, in nats.

        Args:
            order: tokens of each question's image, in order of choice.
            count: number of tokens to keep, from the start of the order.

        Returns:
            The losses, and whether every token of the answer is the most probable one.
        """
        scores, features = [], self._encoded.images.features
        assert features is not None  # `encode_questions` computes them
        image_of, mesh = self._encoded.prompts.image_of[:, 0], self._forward_options.mesh
        for rows, num_rows in batches(len(image_of), self._batch_size):
            row_counts = count[rows].astype(np.int32)
            capacity = choose_bucket(row_counts, self._sizes)
            targets = jax.tree.map(lambda x, rows=rows: x[rows], self._targets)
            tokens, row_order, row_counts, targets = place_rows(
                mesh, (features[image_of[rows]], order[rows], row_counts, targets)
            )
            kept = run_take(tokens, row_order, row_counts, capacity=capacity)
            batch_scores = _run_scores(
                self._model.params,
                backbone=self._model.backbone,
                options=self._forward_options,
                kept=Pruned(kept.index, kept.tokens, kept.valid, kept.count),
                targets=targets,
            )
            scores.append([x[:num_rows] for x in to_host(batch_scores)])
        losses, is_correct = map(np.concatenate, zip(*scores, strict=True))
        return losses, is_correct

    def _draw(self, path: Path, answers: Answers, is_correct: Bool[np.ndarray, " q"]) -> None:
        """Draws the first few questions with the kept tokens."""
        # Imported here: it imports matplotlib, which a run without overlays does not need.
        from stepprune_jax.visualize.overlays import Overlay, draw_rows, format_answer
        from stepprune_jax.visualize.patches import square_patches

        overlays, images, backbone = [], self._encoded.images, self._model.backbone
        for i in range(min(self._settings.overlays, len(answers.texts))):
            question, image = self._split.questions[i], self._encoded.prompts.image_of[i, 0]
            grid = tuple(images.grid[image].tolist())
            is_answer_correct = bool(is_correct[i])
            answer = format_answer(answers.texts[i], self._split.answers[i], is_answer_correct)
            overlays.append(
                Overlay(
                    image=question.image,
                    patches=square_patches(backbone.token_cells(grid, answers.order[i]), grid),
                    title=f"K = {answers.kept[i]}",
                    category=question.category,
                    text=question.text,
                    answer=answer,
                    is_correct=is_answer_correct,
                    grid=max(grid),
                )
            )
        draw_rows(path, [overlays])
