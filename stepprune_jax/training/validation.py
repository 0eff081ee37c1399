"""Validation of a policy during training, on a few held-out questions."""

import functools
import time
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from stepprune_jax.benchmarks.folder import is_right
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.corpus import Limits, make_row
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.llava import Question
from stepprune_jax.data.llava import read_questions as list_questions
from stepprune_jax.evaluation.encode import check_lengths, encode_questions
from stepprune_jax.evaluation.split import Split, read_split, spread_over, thin
from stepprune_jax.extras import require
from stepprune_jax.inference.base import Prompts, RunOptions
from stepprune_jax.inference.pipeline import place_method
from stepprune_jax.inference.programs import run_take
from stepprune_jax.inference.sets import Answers, Batching, answer_all, batches, rank_all
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import fetch, jit_for_weights, mesh_of, place_rows
from stepprune_jax.policy import Pruned
from stepprune_jax.policy.buckets import choose_bucket
from stepprune_jax.pruning import Budget, Method, Policy, Ranking, make_method
from stepprune_jax.pruning.diagnosis import ALL, NONE, OTHER, OWN, RANDOM, describe
from stepprune_jax.training.batches import stack_targets
from stepprune_jax.training.language_loss import ForwardOptions, Targets, row_scores
from stepprune_jax.training.settings import Run
from stepprune_jax.training.step import Setup
from stepprune_jax.user_input import local_path

FOLDER = "overlays"
# Sizes that kept tokens are padded to, as shares of all; each size in use is a program.
_SHARES = (8, 4, 2, 1)

# The cases of a diagnosis, as they are named in a validation's row.
_CASES = {OWN: "", ALL: "_all", NONE: "_none", RANDOM: "_random", OTHER: "_other_question"}

_scores = jit_for_weights(row_scores, ("model", "options"))


# Of each question: the loss of its correct answer, and whether every token of it is preferred.
Scores = tuple[Float[np.ndarray, " q"], Bool[np.ndarray, " q"]]


class Selection(NamedTuple):
    """Kept tokens of each question's image.

    Attributes:
        order: [q, t] indices in order of choice.
        count: [q] number of kept tokens.
    """

    order: np.ndarray
    count: np.ndarray


def read_questions(run: Run, setup: Setup) -> Split | None:
    """Reads the questions of a run's validation, before anything is loaded."""
    if not run.validation.every:
        return None
    if run.validation.overlays:
        require("matplotlib", "config.validation.overlays, which draws, is not 0")
    budget, most = run.validation.budget, setup.method.most(setup.model.max_image_tokens)
    if budget > most:
        raise ValueError(f"config.validation.budget is {budget}, expected at most {most}")
    folder = _folder(run)
    if folder is None:
        raise ValueError("config.validation.folder is empty, expected one with validation.jsonl")
    split = read_split(folder, "validation")
    return thin(split, run.validation.questions)


def read_calibration_questions(run: Run) -> list[Question]:
    """Reads the questions on which a trained policy's stop is calibrated."""
    folder, most = _folder(run), run.validation.calibrate
    if not most or folder is None or not (file := folder / "validation.jsonl").is_file():
        return []
    try:
        questions = list_questions(file, folder / "images")
    except (OSError, ValueError) as error:
        hint = "config.validation.calibrate=0 skips the file"
        # Not of the same type: some, such as decoding errors, cannot be built from a text.
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{error}; {hint}") from error
    return [questions[at] for at in spread_over(len(questions), most)]


def _folder(run: Run) -> Path | None:
    """Returns the folder of a run's validation split; None if neither it nor the data's is set."""
    given = run.validation.folder or run.data.folder
    folder = local_path(given)
    if run.validation.folder and not folder.is_dir():
        raise FileNotFoundError(f"config.validation.folder: no folder {folder}")
    return folder if given else None


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
        check_lengths(self._encoded._replace(prompts=prompts), model.config.family.CONTEXT_LIMIT)
        sizes = tuple(sorted({-(-n // share) for share in _SHARES}))
        self._batching = Batching(self._size, sizes)
        longest = self._settings.max_new_tokens
        self._run = RunOptions(execution=execution, max_tokens=longest)
        self._options = ForwardOptions(execution, mesh=mesh_of(model.params))

    def _read_answers(self) -> Targets:
        """Returns the questions with their correct answers."""
        family = self._model.config.family
        encoder = ConversationEncoder(
            self._model.tokenizer, family.place_images, family.conversation
        )
        limits = Limits(image_tokens=0, context=1 << 31, policy_text=0)  # the whole answers
        rows = [
            make_row(encoder.encode((question.text, right), 1), limits)
            for question, right in zip(self._split.questions, self._split.answers, strict=True)
        ]
        longest = max(len(row.ids) for row in rows)
        grid = self._encoded.images.grid[self._encoded.prompts.image_of[:, 0]]
        return stack_targets(rows, grid, longest, max(len(row.target) for row in rows))

    def __call__(self, step: int, policy: Policy, entropy: float) -> dict[str, float | int]:
        """Answers the questions from the policy's kept tokens, and draws a few.

        A finding may need the `entropy` of the policy's choices in training.
        """
        begin = time.perf_counter()
        answers, selection = self.answer(policy)
        texts, count = answers.texts, answers.kept
        right = np.array(list(map(is_right, texts, self._split.answers)))
        found = self._compare(policy, selection)
        read = policy.config.text_width  # else another question changes nothing
        losses = {case: loss for case, (loss, _) in found.items() if read or case != OTHER}
        for finding in describe(round(float(count.mean())), losses, entropy).findings:
            distributed.say(f"validation at step {step}: {finding}")
        if self._settings.overlays and distributed.is_main():
            self._draw(self._folder / f"step_{step:08d}.png", answers, right)
        return {
            "step": step,
            **{f"loss{name}": self._mean(found[case][0]) for case, name in _CASES.items()},
            **{
                f"accuracy{name}": _percent(found[case][1])
                for case, name in _CASES.items()
                if case != OWN
            },
            "accuracy": _percent(right),
            "k_mean": float(count.mean()),
            "k_std": float(count.std()),
            "k_min": int(count.min()),
            "k_max": int(count.max()),
            "questions": len(texts),
            "seconds": round(time.perf_counter() - begin, 2),
        }

    def answer(self, policy: Policy) -> tuple[Answers, Selection]:
        """Answers from the tokens that a policy keeps, at its own stop or at the set budget.

        A policy without a stop keeps a quarter of the tokens if no budget is set.
        """
        method, ranking = self._rank(policy, self._encoded.prompts)
        answers = answer_all(
            self._model,
            method,
            self._encoded.prompts,
            self._encoded.images,
            self._run,
            self._batching,
            ranking=ranking,
        )
        return answers, Selection(ranking.order, answers.kept)

    def _rank(self, policy: Policy, prompts: Prompts) -> tuple[Method, Ranking]:
        """Orders the tokens of the questions' images for some prompts."""
        n, budget = self._model.config.max_image_tokens, self._settings.budget
        free = Budget("own") if policy.has_stop else Budget("rate", Fraction(1, 4))
        kept = Budget("count", budget) if budget else free
        method = place_method(self._model, make_method(None, kept, policy=policy))
        steps = method.pruner.entering(n) or method.pruner.most(n)
        given = (self._model, method, prompts, self._encoded.images)
        return method, rank_all(*given, steps=steps, batch_size=self._size)[0]

    def _compare(self, policy: Policy, selection: Selection) -> dict[str, Scores]:
        """Scores answers from a policy's tokens and from others, by the cases of a diagnosis."""
        prompts = self._encoded.prompts
        words, number = (np.roll(x, 1, axis=0) for x in (prompts.words, prompts.num_words))
        _, ranking = self._rank(policy, prompts._replace(words=words, num_words=number))
        return {
            **self._bounds,
            RANDOM: self.scores(Selection(np.argsort(self._noise, axis=1), selection.count)),
            OWN: self.scores(selection),
            OTHER: self.scores(Selection(ranking.order, selection.count)),
        }

    @functools.cached_property
    def _noise(self) -> Float[np.ndarray, "q n"]:
        """A number for each token, by which random ones are chosen; largest in the padding."""
        sizes, n = self._encoded.sizes, self._model.config.max_image_tokens
        noise = np.random.default_rng(0).random((len(sizes), n))
        return np.where(np.arange(n) < sizes[:, None], noise, 2)

    @functools.cached_property
    def _bounds(self) -> dict[str, Scores]:
        """The scores with all tokens and with none, which no policy changes."""
        sizes, n = self._encoded.sizes, self._model.config.max_image_tokens
        order = np.broadcast_to(np.arange(n), (len(sizes), n))
        counts = {ALL: sizes, NONE: np.zeros_like(sizes)}
        return {case: self.scores(Selection(order, count)) for case, count in counts.items()}

    def _mean(self, losses: Float[np.ndarray, " q"]) -> float:
        """Returns the mean loss of a supervised token."""
        return float(losses.sum() / self._targets.supervised.sum())

    def scores(self, selection: Selection) -> Scores:
        """Computes the summed cross-entropy of each correct answer after kept tokens, in nats.

        Also whether each of its tokens is the most probable one.
        """
        scores, vision = [], self._encoded.images
        image_of = self._encoded.prompts.image_of[:, 0]
        mesh = self._options.mesh
        for rows, real in batches(len(image_of), self._size):
            order, count = selection.order[rows], selection.count[rows].astype(np.int32)
            capacity = choose_bucket(count, self._batching.sizes)
            targets = Targets(*(part[rows] for part in self._targets))
            arrays = place_rows(mesh, (vision.features[image_of[rows]], order, count, targets))
            features, order, count, targets = arrays
            kept = run_take(features, order, count, capacity=capacity)
            of_rows = _scores(
                self._model.params,
                model=self._model.config,
                options=self._options,
                kept=Pruned(kept.index, kept.tokens, kept.valid, kept.count),
                targets=targets,
            )
            scores.append([x[:real] for x in fetch(of_rows)])
        losses, right = map(np.concatenate, zip(*scores, strict=True))
        return losses, right

    def _draw(self, path: Path, answers: Answers, right: Bool[np.ndarray, " q"]) -> None:
        """Draws the first few questions."""
        # Imported here: it imports matplotlib, which a run without overlays does not need.
        from stepprune_jax.visualize.overlays import Overlay, draw_rows, judged
        from stepprune_jax.visualize.patches import square_patches

        shown, images = [], self._encoded.images
        for i in range(min(self._settings.overlays, len(answers.texts))):
            question, image = self._split.questions[i], self._encoded.prompts.image_of[i, 0]
            grid = tuple(images.grid[image].tolist())
            shown.append(
                Overlay(
                    image=question.image,
                    patches=square_patches(answers.order[i], grid),
                    title=f"K = {answers.kept[i]}",
                    category=question.category,
                    text=question.text,
                    answer=judged(answers.texts[i], self._split.answers[i], bool(right[i])),
                    right=bool(right[i]),
                    grid=max(grid),
                )
            )
        draw_rows(path, [shown])


def _percent(right: Bool[np.ndarray, " q"]) -> float:
    """Returns the share of right answers in percent."""
    return round(100 * float(right.mean()), 2)
