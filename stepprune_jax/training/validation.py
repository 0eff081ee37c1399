"""Looking at a policy while it is trained, on a few questions that it is not trained on."""

import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from stepprune_jax.benchmarks.shapes import is_right
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.data.corpus import Limits, make_row
from stepprune_jax.data.encoding import encode_conversation
from stepprune_jax.evaluation.answers import Answering, Selection, answer, check_lengths, keep
from stepprune_jax.evaluation.orders import batches, trained_order
from stepprune_jax.evaluation.rows import grid_shape
from stepprune_jax.evaluation.split import Split, encode_split, read_split, thin
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import fetch, jit_for_weights, mesh_of, place_rows
from stepprune_jax.policy import count_at_bias
from stepprune_jax.training.batches import stack_targets
from stepprune_jax.training.language_loss import ForwardOptions, Targets, row_losses
from stepprune_jax.training.step import Setup

FOLDER = "overlays"
# Sizes that kept tokens are padded to, as shares of all: a program each, as far as it is needed.
_SHARES = (8, 4, 2, 1)

_losses = jit_for_weights(row_losses, ("model", "options"))


def read_questions(config: Any, setup: Setup, workdir: Path) -> Split | None:
    """The questions of a run's validation, before anything is loaded.

    Args:
        config: the run's checked `ConfigDict`; `validation.every` of 0 asks for none.
        setup: what is trained.
        workdir: folder of the run, where the shapes world is.

    Returns:
        Questions and answers, as many as are asked for, or None.

    Raises:
        FileNotFoundError: a file or a picture is missing.
        ValueError: a budget that cannot be kept, or a file that is not what it should be; the
            message names file, line and field.
    """
    if not config.validation.every:
        return None
    budget, most = config.validation.budget, setup.selector.steps(setup.model.num_image_tokens)
    if budget > most:
        raise ValueError(f"config.validation.budget is {budget}, expected at most {most}")
    folder = config.validation.folder or config.data.folder or workdir / "data"
    found = read_split(Path(folder).expanduser(), "validation")
    return thin(found, config.validation.questions)


class Validation:
    """Passes over the same questions, for which the tower has run once.

    Of several processes all have to make them; each knows all results, the main one draws.
    """

    def __init__(self, config: Any, model: VLM, split: Split, workdir: Path):
        """Runs the tower and tokenises.

        Args:
            config: the run's checked `ConfigDict`.
            model: the frozen model.
            split: from `read_questions`.
            workdir: folder of the run.

        Raises:
            ValueError: a picture that cannot be read, or a question that is too long.
        """
        self._config, self._model, self._split = config.validation, model, split
        self._folder, self._size = workdir / FOLDER, config.batch_size
        attention, n = config.model.attention, model.config.num_image_tokens
        self._encoded = encode_split(
            model, split.questions, batch_size=self._size, attention=attention
        )
        check_lengths(self._encoded, n)
        self._ladder = tuple(sorted({-(-n // share) for share in _SHARES}))
        self._how = Answering(
            self._ladder, self._size, self._config.max_new_tokens, attention=attention
        )
        self._options = ForwardOptions(attention, mesh=mesh_of(model.params))
        self._targets = self._read_answers(
            Limits(n, config.data.context_limit, config.data.policy_text_limit)
        )

    def _read_answers(self, limits: Limits) -> Targets:
        """Questions with their right answers, places counted with all visual tokens."""
        rows = [
            make_row(encode_conversation(self._model.tokenizer, (question.text, right), 1), limits)
            for question, right in zip(self._split.questions, self._split.answers, strict=True)
        ]
        longest = max(len(row.ids) for row in rows)
        return stack_targets(rows, longest, max(len(row.target) for row in rows))

    def __call__(self, step: int, policy: Policy) -> dict[str, float | int]:
        """Asks the questions, with what the policy keeps of each picture, and draws a few.

        Args:
            step: updates done.
            policy: as it is now.

        Returns:
            "step"; "loss" of the right answers in nats a token, "accuracy" of the model's own in
            percent, mean, standard deviation and range of K, "questions", and "seconds" taken.
        """
        begin = time.perf_counter()
        selection = self.select(policy)
        texts = answer(self._model, self._encoded, selection, self._how).texts
        right = np.array(list(map(is_right, texts, self._split.answers)))
        losses, count = self.losses(selection), selection.count
        if self._config.overlays and distributed.is_main():
            self._draw(self._folder / f"step_{step:08d}.png", selection, texts)
        return {
            "step": step,
            "loss": float(losses.sum() / self._targets.supervised.sum()),
            "accuracy": round(100 * float(right.mean()), 2),
            "k_mean": float(count.mean()),
            "k_std": float(count.std()),
            "k_min": int(count.min()),
            "k_max": int(count.max()),
            "questions": len(texts),
            "seconds": round(time.perf_counter() - begin, 2),
        }

    def select(self, policy: Policy) -> Selection:
        """What the policy keeps where it stops, or within the budget of the configuration.

        A policy without a stop keeps a quarter of the tokens if no budget is given.
        """
        n, budget = self._model.config.num_image_tokens, self._config.budget
        if not budget and policy.method != "stepprune":
            budget = -(-n // 4)
        found = trained_order(
            self._model, policy, self._encoded,
            steps=budget or policy.config.steps(n), batch_size=self._size,
        )  # fmt: skip
        if budget:
            return Selection(found.order, np.full(len(found.order), budget, np.int32))
        least = min(policy.config.min_tokens, found.order.shape[1])
        margin = jnp.asarray(found.margin)
        count = count_at_bias(margin, policy.stop_bias, least)
        return Selection(found.order, np.asarray(count, np.int32))

    def losses(self, selection: Selection) -> Float[np.ndarray, " q"]:
        """Cross-entropy of the right answers after what was kept, in nats, summed for each."""
        found = []
        for rows, count in batches(len(selection.count), self._size):
            pruned = keep(self._encoded, selection, rows, self._ladder)
            targets = Targets(*(part[rows] for part in self._targets))
            # Their places are counted with all tokens, and here with those there is room for.
            absent = self._model.config.num_image_tokens - pruned.tokens.shape[1]
            targets = targets._replace(place=targets.place - absent)
            pruned, targets = place_rows(self._options.mesh, (pruned, targets))
            losses = _losses(
                self._model.params,
                model=self._model.config,
                options=self._options,
                kept=pruned,
                targets=targets,
            )
            found.append(fetch(losses)[:count])
        return np.concatenate(found)

    def _draw(self, path: Path, selection: Selection, texts: list[str]) -> None:
        """A picture of the first few questions."""
        # Imported here: it brings matplotlib, which a run without overlays does not need.
        from stepprune_jax.visualize.strip import Example, draw_strip

        grid = grid_shape(self._model.config)
        first = self._model.config.num_image_tokens - grid[0] * grid[1]
        examples = []
        for i in range(min(self._config.overlays, len(texts))):
            question, kept = self._split.questions[i], selection.order[i, : selection.count[i]]
            order = kept[kept >= first] - first
            examples.append(
                Example(question.image, order, question.text, texts[i], self._split.answers[i])
            )
        draw_strip(path, examples, grid)
