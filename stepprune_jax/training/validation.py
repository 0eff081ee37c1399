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
from stepprune_jax.data.videos import ClipShape
from stepprune_jax.evaluation.split import Split, read_split, spread_over, thin
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
    CONFIG_REMEDIES,
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

# The diagnosis compares the policy's tokens with other choices of tokens, called cases. These are
# the suffixes of the fields of each case in validation.jsonl.
_SUFFIXES = {
    POLICY: "",
    ALL: "_all",
    NONE: "_none",
    RANDOM: "_random",
    OTHER_QUESTION: "_other_question",
}

_run_scores = jit_for_weights(row_scores, ("backbone", "options"))

# Loss of each question's correct answer, and whether the model would generate this answer greedily:
# every token of the answer is the most probable token.
Scores = tuple[Float[np.ndarray, " q"], Bool[np.ndarray, " q"]]


def read_questions(run: Run, config: StepConfig) -> Split | None:
    """Reads the validation questions of a run, before weights are loaded.

    Args:
        run: settings of the run.
        config: static part of the updates.

    Returns:
        The questions with their answers; None if the run has no validation.

    Raises:
        UserError: a validation setting does not suit the model or the policy, or no folder is set.
    """
    settings, model = run.validation, config.backbone.config
    if not settings.every:
        return None
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
    return thin(read_split(folder, "validation", run.data.sampling), settings.questions)


def read_model_questions(run: Run) -> Split | None:
    """Reads questions on which the frozen model is tested before a run without validation.

    Args:
        run: settings of the run, with the number of questions.

    Returns:
        The questions with their answers; None if there is no validation split, if a file of the
        split is invalid, or if calibration is turned off as well as validation.
    """
    folder = _find_folder(run)
    if folder is None or not run.validation.calibrate:
        return None
    try:
        return thin(read_split(folder, "validation", run.data.sampling), run.validation.questions)
    except (OSError, UserError):
        return None


def read_calibration_questions(run: Run) -> list[Question]:
    """Reads the questions on which the stop of the trained policy is calibrated.

    Args:
        run: settings of the run, with the number of questions.

    Returns:
        Questions that are evenly spaced in the validation split; an empty list if calibration is
        turned off or if there is no validation split.

    Raises:
        UserError: the file of the split is invalid.
    """
    folder, limit = _find_folder(run), run.validation.calibrate
    if not limit or folder is None or not (file := folder / "validation.jsonl").is_file():
        return []
    try:
        fps, num_frames = run.data.sampling
        questions = read_question_file(file, folder / "images", fps=fps, num_frames=num_frames)
    except (OSError, UserError) as error:
        hint = "config.validation.calibrate=0 skips the file"
        raise UserError(f"{error}; {hint}") from error
    return [questions[index] for index in spread_over(len(questions), limit)]


def _find_folder(run: Run) -> Path | None:
    """Returns the validation folder; by default the data folder, or None if none is set.

    Raises:
        FileNotFoundError: the validation folder does not exist.
    """
    folder_name = run.validation.folder or run.data.folder
    folder = local_path(folder_name)
    if run.validation.folder and not folder.is_dir():
        raise FileNotFoundError(f"config.validation.folder: no folder {folder}")
    return folder if folder_name else None


# Below this accuracy with all tokens, most rewards and losses do not depend on the kept tokens.
_MIN_ACCURACY = 0.1


def describe_model(
    is_correct: Bool[np.ndarray, " q"], is_blind_correct: Bool[np.ndarray, " q"]
) -> list[str]:
    """Describes how well the frozen model answers questions, and warns of useless questions.

    Args:
        is_correct: [q] whether the model answers a question with all visual tokens.
        is_blind_correct: [q] whether the model answers a question without visual tokens.

    Returns:
        A line with the accuracies, and possibly a warning.
    """
    accuracy, blind_accuracy = is_correct.mean(), is_blind_correct.mean()
    lines = [
        f"the frozen model answers {100 * accuracy:.1f} % of {len(is_correct)} validation "
        f"questions with all tokens, {100 * blind_accuracy:.1f} % without an image"
    ]
    gain = is_correct.astype(float) - is_blind_correct
    error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
    if accuracy < _MIN_ACCURACY:
        lines.append(
            "warning: the model can hardly answer these questions, so a policy has little to learn "
            "from them; compare the form of the answers, or use another model"
        )
    elif gain.mean() <= 2 * error:
        lines.append(
            f"warning: the image gains {100 * gain.mean():.1f} +- {100 * error:.1f} points, so "
            "these questions hardly show which tokens matter; use questions that need the image"
        )
    return lines


class Validation:
    """Validation of policies on a fixed set of questions.

    The constructor runs the tower over the images once, for all validations. With several
    processes, each process must make the same calls and gets all results. Only the main process
    draws overlays.
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
        images = self._encoded.images
        if images.clips is not None and images.features is not None:
            n = images.features.shape[1]
        self._targets = self._encode_answers()
        # A conversation with its answer must not be truncated, so its length is checked.
        prompts = self._encoded.prompts._replace(length=self._targets.length)
        check_lengths(prompts, self._encoded.sizes[:, None], model.backbone.CONTEXT_LIMIT)
        self._sizes = fraction_ladder(n)
        self._run_options = RunOptions(self._settings.max_new_tokens, execution=execution)
        self._forward_options = ForwardOptions(execution, mesh=mesh_of(model.params))
        is_real = np.arange(n) < self._encoded.sizes[:, None]
        noise = np.random.default_rng(0).random(is_real.shape)
        # Noise is below 1, so the value 2 sorts padding after all real tokens.
        self._random_order = np.argsort(np.where(is_real, noise, 2), axis=1)
        # Scores of the cases that do not depend on the policy.
        self._fixed_scores: dict[str, Scores] = {}

    def _encode_answers(self) -> Targets:
        """Encodes the questions with their correct answers."""
        backbone = self._model.backbone
        encoder = ConversationEncoder(
            self._model.tokenizer,
            backbone.place_images,
            backbone.conversation,
            place_videos=backbone.place_videos,
        )
        # Without limits on the lengths, no answer is truncated.
        limits = LengthLimits(image_tokens=0, context=1 << 31, policy_text=0)
        rows = [
            make_row(encoder.encode((question.text, answer), 1, self._clip_shape(question)), limits)
            for question, answer in zip(self._split.questions, self._split.answers, strict=True)
        ]
        max_ids, max_targets = (
            max(map(len, arrays)) for arrays in zip(*((r.ids, r.target) for r in rows), strict=True)
        )
        images, image_of = self._encoded.images, self._encoded.prompts.image_of[:, 0]
        clips = None if images.clips is None else images.clips.take(image_of)
        return stack_targets(rows, images.grid[image_of], max_ids, max_targets, clips)

    def _clip_shape(self, question: Question) -> ClipShape | None:
        """Returns the shape of a question's video, whose times are part of its prompt."""
        if question.video is None:
            return None
        return self._model.backbone.inspect_video(self._model.image_settings, question.video)

    def test_model(self) -> list[str]:
        """Tests the frozen model on the questions, with all tokens and without visual tokens.

        Returns:
            One line with the accuracies, and a warning if the model cannot answer the questions or
            if the image does not help it. A correct answer is the answer that the model prefers,
            word by word.
        """
        num_questions, max_tokens = self._random_order.shape
        order = np.tile(np.arange(max_tokens, dtype=np.int32), (num_questions, 1))
        no_tokens = np.zeros(num_questions, np.int32)
        self._fixed_scores = {
            ALL: self.scores(order, self._encoded.sizes),
            NONE: self.scores(order[:, :1], no_tokens),
        }
        _, is_correct = self._fixed_scores[ALL]
        _, is_blind_correct = self._fixed_scores[NONE]
        return describe_model(is_correct, is_blind_correct)

    def __call__(
        self, step: int, policy: Policy, entropy: float, recipe: str = ""
    ) -> dict[str, float | int]:
        """Validates a policy: accuracy, losses, findings of a diagnosis, and overlays.

        Args:
            step: number of updates done.
            policy: the policy.
            entropy: entropy of the policy's choices in training, for the diagnosis.
            recipe: name of the objective that trains the policy, so that the diagnosis can advise
                another recipe; empty for no advice.

        Returns:
            A row of validation.jsonl.
        """
        start_time = time.perf_counter()
        answers = self.answer(policy)
        num_kept = answers.kept
        is_correct = np.array(list(map(is_right, answers.texts, self._split.answers)))
        scores = self._score_cases(policy, answers)
        self._diagnose(policy, num_kept, scores, step=step, entropy=entropy, recipe=recipe)
        if self._settings.overlays and distributed.is_main():
            self._draw(self._folder / f"step_{step:08d}.png", answers, is_correct)
        num_supervised = self._targets.supervised.sum()
        row: dict[str, float | int] = {"step": step}
        for case, suffix in _SUFFIXES.items():
            loss, is_case_correct = scores[case]
            row[f"loss{suffix}"] = float(loss.sum() / num_supervised)
            if case == POLICY:  # the accuracy of the generated answers
                is_case_correct = is_correct
            row[f"accuracy{suffix}"] = round(100 * float(is_case_correct.mean()), 2)
        return row | {
            "k_mean": float(num_kept.mean()),
            "k_std": float(num_kept.std()),
            "k_min": int(num_kept.min()),
            "k_max": int(num_kept.max()),
            "questions": len(num_kept),
            "seconds": round(time.perf_counter() - start_time, 2),
        }

    def _diagnose(
        self,
        policy: Policy,
        num_kept: Int[np.ndarray, " q"],
        scores: dict[str, Scores],
        *,
        step: int,
        entropy: float,
        recipe: str,
    ) -> None:
        """Compares the scores of all cases, and logs the findings.

        Args:
            policy: the policy.
            num_kept: [q] number of tokens that the policy keeps for each question.
            scores: scores of each case, from `_score_cases`.
            step: number of updates done.
            entropy: entropy of the policy's choices in training.
            recipe: see `__call__`.
        """
        # A policy that does not read the question keeps the same tokens for another question.
        reads_text = bool(policy.config.text_width)
        losses = {
            case: loss for case, (loss, _) in scores.items() if reads_text or case != OTHER_QUESTION
        }
        stop_counts = self._count_stops(policy, num_kept)
        mean_kept = round(float(num_kept.mean()))
        diagnosis = describe(
            mean_kept,
            losses,
            entropy,
            recipe=recipe,
            stops=stop_counts,
            remedies=CONFIG_REMEDIES,
        )
        for finding in diagnosis.findings:
            distributed.say(f"validation at step {step}: {finding}")

    def _count_stops(self, policy: Policy, num_kept: Int[np.ndarray, " q"]) -> StopCounts | None:
        """Summarizes the numbers of tokens at which a learned stop ends.

        Args:
            policy: the policy.
            num_kept: [q] number of tokens that the policy keeps for each question.

        Returns:
            The summary; None if a budget determines the numbers.
        """
        if self._settings.budget or not policy.has_stop:
            return None
        sizes = self._encoded.sizes
        max_counts = np.array([min(size, policy.longest(size)) for size in sizes.tolist()])
        min_counts = np.minimum(policy.min_tokens, max_counts)
        return describe_counts(num_kept, min_counts, max_counts, sizes)

    def answer(self, policy: Policy) -> Answers:
        """Answers the questions from the tokens that a policy keeps.

        The budget of the validation settings or the learned stop decides the number of tokens.
        """
        batching = Batching(self._batch_size, self._sizes)
        (answers,) = self._make_generator(policy).answer_set(self._encoded, batching)
        return answers

    def _make_generator(self, policy: Policy) -> Generator:
        """Returns a generator with a policy at the budget of the validation settings.

        Without this budget, a policy uses its learned stop. A policy without a learned stop keeps a
        quarter of the tokens.
        """
        if self._settings.budget:
            budget = Budget("count", self._settings.budget)
        elif policy.has_stop:
            budget = Budget("adaptive")
        else:
            budget = Budget("rate", Fraction(1, 4))
        return Generator(self._model, policy.with_budget(budget), options=self._run_options)

    def _score_cases(self, policy: Policy, answers: Answers) -> dict[str, Scores]:
        """Scores the correct answers for each case of the diagnosis.

        A case is a choice of tokens: the tokens of the policy, all tokens, no tokens, random
        tokens, or the tokens that the policy keeps for the same image and another question.

        Args:
            policy: the policy.
            answers: answers from the policy's tokens, with the kept tokens.

        Returns:
            The scores by case.
        """
        prompts, images = self._encoded.prompts, self._encoded.images
        # Each question gets the words of the previous question.
        words, num_words = (np.roll(x, 1, axis=0) for x in (prompts.words, prompts.num_words))
        pruner = self._make_generator(policy).placed
        assert isinstance(pruner, Policy)  # the same policy, on the model's devices
        schedule = pruner.schedule(self._model.config, self._random_order.shape[1])
        other_ranking, _ = rank_all(
            self._model,
            pruner,
            prompts._replace(words=words, num_words=num_words),
            images,
            steps=schedule.enter or schedule.most,
            batch_size=self._batch_size,
        )
        num_questions, max_count = len(answers.kept), max(1, answers.kept.max(initial=0))
        policy_order = np.zeros((num_questions, max_count), np.int32)
        for row, order in enumerate(answers.order):
            policy_order[row, : len(order)] = order
        tokens_of_case = cases(
            policy_order,
            other_ranking.order,
            self._random_order,
            answers.kept,
            self._encoded.sizes,
        )
        scores = {
            case: self._fixed_scores.get(case) or self.scores(order, count)
            for case, (order, count) in tokens_of_case.items()
        }
        self._fixed_scores = {case: scores[case] for case in (ALL, NONE)}
        return scores

    def scores(self, order: Int[AnyArray, "q t"], count: Int[AnyArray, " q"]) -> Scores:
        """Scores the correct answer of each question, given the tokens to keep.

        Args:
            order: [q, t] indices of tokens of each question's image.
            count: [q] number of tokens to keep, from the start of each order.

        Returns:
            losses: [q] summed cross-entropy of each answer, in nats.
            is_correct: [q] True = every token of the answer is the most probable token.
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
            scores.append([array[:num_rows] for array in to_host(batch_scores)])
        losses, is_correct = map(np.concatenate, zip(*scores, strict=True))
        return losses, is_correct

    def _draw(self, path: Path, answers: Answers, is_correct: Bool[np.ndarray, " q"]) -> None:
        """Draws images of the first questions with the kept tokens and the answers.

        Args:
            path: file to write.
            answers: answers from the policy's tokens.
            is_correct: [q] whether each answer is correct.
        """
        # Imported here: it imports matplotlib, which a run without overlays does not need.
        from stepprune_jax.visualize.overlays import Overlay, draw_rows, format_answer
        from stepprune_jax.visualize.patches import square_patches

        overlays, images, backbone = [], self._encoded.images, self._model.backbone
        image_rows = [
            row for row, question in enumerate(self._split.questions) if question.video is None
        ]
        if not image_rows:  # only questions about images are drawn
            return
        for row in image_rows[: self._settings.overlays]:
            question, image_row = self._split.questions[row], self._encoded.prompts.image_of[row, 0]
            grid = tuple(images.grid[image_row].tolist())
            is_answer_correct = bool(is_correct[row])
            answer = format_answer(answers.texts[row], self._split.answers[row], is_answer_correct)
            overlays.append(
                Overlay(
                    image=question.image,
                    patches=square_patches(backbone.token_cells(grid, answers.order[row]), grid),
                    title=f"K = {answers.kept[row]}",
                    category=question.category,
                    text=question.text,
                    answer=answer,
                    is_correct=is_answer_correct,
                    grid=max(grid),
                )
            )
        draw_rows(path, [overlays])
