"""MMTok: keeps tokens that cover the question and all other tokens of the image.

Dong et al. (https://arxiv.org/abs/2508.18264), following the authors' program. A token covers a
word as far as their embeddings are similar, and it covers another token as far as their features in
the tower are similar. A set of tokens covers a word or a token as well as its best member. Tokens
are added greedily: each increases the total coverage most. If images are split into tiles, the
tokens of a tile cover the question and their own tile.
"""

import dataclasses
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.ordering import advance_turns, start_turns, tile_taps, unit_vectors

_EXACT = jax.lax.Precision.HIGHEST
_LOWEST = jnp.finfo(jnp.float32).min
_TINY = jnp.finfo(jnp.float32).tiny
# The authors' temperatures of the similarity of words and tokens, for LLaVA and Qwen2.5-VL.
_TEXT_TEMPERATURE_WITH_CLASS_TOKEN = 0.02
_TEXT_TEMPERATURE = 0.01
# Instructions of benchmarks that the authors remove from a question.
_INSTRUCTIONS = (
    "Answer the question using a single word or phrase.",
    "Answer with the option's letter from the given choices directly.",
)
# Words without a meaning that an image could show, as the authors list them.
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        a an and answer are at be been being but by did do does for from had has have he how i if
        into is it onto or question she so the then they to upon was we were what when where which
        who why with you
        """,
    )
)


@dataclasses.dataclass(frozen=True)
class MMTok(Ranker):
    """Keeps tokens that cover the question and all other tokens of the image.

    The coverage of a word by a token is the softmax, over the tokens of the image, of the cosine
    between the word's embedding and the projected tokens. The coverage of a token by another token
    is the softmax of the cosine between their features in the tower. Both are averaged. Without a
    question, tokens cover only one another. If a model splits images into tiles, tokens are chosen
    from the tiles in turn. Ties go to the earlier token.

    Attributes:
        alpha: weight of the coverage of tokens, against the coverage of words.
        text_temperature: temperature of the coverage of words. None for the authors' choice: 0.02
            for a tower with a class token, and 0.01 for other towers.
        vision_temperature: temperature of the coverage of tokens.
    """

    alpha: float = 0.5
    text_temperature: float | None = None
    vision_temperature: float = 0.2

    name = "mmtok"
    label = "MMTok"
    after_projector: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True
    reads_words: ClassVar[bool] = True
    reads_videos: ClassVar[bool] = False
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects options out of range."""
        super().check(config, num_tokens)
        self.expect("alpha", self.alpha >= 0, "0 or more")
        is_valid = self.text_temperature is None or self.text_temperature > 0
        self.expect("text_temperature", is_valid, "None, or above 0")
        self.expect("vision_temperature", self.vision_temperature > 0, "above 0")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns taps of the features that are projected, and of tiles if there are any."""
        block = config.class_token_block
        return Tap("hidden", -1 if block is None else block + 1), *tile_taps(config)

    def words(self, config: ModelConfig, text: str) -> list[str]:
        """Returns the words of a question that tokens have to cover.

        As in the authors' programs, words without a visible meaning and punctuation are removed for
        LLaVA, unless no word would remain. Qwen2.5-VL reads "Question:" and all words.
        """
        if config.class_token_block is None:
            return f"Question: {text}".split()
        for instruction in _INSTRUCTIONS:
            text = text.replace(instruction, "")
        keywords = [
            word for word in re.findall(r"\b\w+\b", text) if word.lower() not in _STOP_WORDS
        ]
        return keywords or text.split()

    def rank(self, inputs: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row by greedy maximization of the coverage.

        Args:
            inputs: inputs of the pruner. The first tap is the features of the tokens in the tower,
                which may begin with a class token. If images are split into tiles, the second tap
                is the tile of each token.
            steps: static length of the order.

        Returns:
            The order of the tokens.
        """
        (features, *tile), (r, n) = inputs.taps, inputs.valid.shape
        has_class_token = features.shape[1] > n
        if has_class_token:
            features = features[:, 1:]
        temperature = self.text_temperature
        if temperature is None:
            temperature = (
                _TEXT_TEMPERATURE_WITH_CLASS_TOKEN if has_class_token else _TEXT_TEMPERATURE
            )
        part = tile[0] if tile else jnp.zeros((r, n), jnp.int32)
        # Tokens at the ends of rows belong to no tile.
        is_patch = inputs.valid & (part >= 0)

        unit_tokens = unit_vectors(inputs.tokens, is_patch)
        unit_words = unit_vectors(inputs.text, inputs.text_valid)
        cosine = jnp.einsum("rne,rme->rnm", unit_tokens, unit_words, precision=_EXACT)
        is_word = inputs.text_valid[:, None]
        text_coverage = _softmax_in_parts(cosine / temperature, is_patch, part)
        num_words = jnp.maximum(1, is_word.sum(2, keepdims=True))
        text_coverage = jnp.where(is_word, text_coverage / num_words, 0)

        unit_features = unit_vectors(features, is_patch)
        cosine = jnp.einsum("rnd,rmd->rnm", unit_features, unit_features, precision=_EXACT)
        same_part = is_patch[:, None] & is_patch[..., None] & (part[:, None] == part[..., None])
        part_sizes = jnp.maximum(1, same_part.sum(1, keepdims=True))
        token_coverage = _softmax(cosine / self.vision_temperature, same_part) / part_sizes
        turn = start_turns(inputs.valid, part)
        return Ranking(
            grow_coverage(text_coverage, self.alpha * token_coverage, part, turn, steps=steps)
        )


def _softmax(logits: Float[Array, "r n m"], mask: Bool[Array, "r n #m"]) -> Float[Array, "r n m"]:
    """Returns the softmax over the tokens n under the mask; 0 at all other tokens."""
    logits = jnp.where(mask, logits, _LOWEST)
    powers = jnp.where(mask, jnp.exp(logits - logits.max(1, keepdims=True)), 0)
    return powers / jnp.maximum(powers.sum(1, keepdims=True), _TINY)


def _softmax_in_parts(
    logits: Float[Array, "r n m"], is_patch: Bool[Array, "r n"], part: Int[Array, "r n"]
) -> Float[Array, "r n m"]:
    """Returns the softmax over the tokens of each part; 0 at tokens that are no patches."""

    def add_part(part_index, coverage):
        is_member = is_patch & (part == part_index)
        return coverage + _softmax(logits, is_member[..., None])

    return jax.lax.fori_loop(0, part.max() + 1, add_part, jnp.zeros(logits.shape, jnp.float32))


def grow_coverage(
    text_coverage: Float[Array, "r n m"],
    token_coverage: Float[Array, "r n n"],
    part: Int[Array, "r n"],
    turn: Int[Array, "r n"],
    *,
    steps: int,
) -> Int[Array, "r t"]:
    """Chooses tokens one by one, such that each increases the total coverage most.

    A word, or a token, is covered by a set of tokens as well as by the best token of the set. The
    total is the sum over all tokens, and over all words in each part of the image.

    Args:
        text_coverage: [r, n, m] how well each of n tokens covers each of m words.
        token_coverage: [r, n, n] how well each token (first axis) covers each token (second axis);
            0 for tokens of different parts and for padding.
        part: [r, n] part of the image to which each token belongs.
        turn: [r, n] result of `start_turns`.
        steps: number t of tokens to choose; static.

    Returns:
        [r, t] int32 indices in order of choice; undefined after a row's last token.
    """

    def step(carry, _):
        # best_of_words: [r, n, m] coverage of the words by the chosen tokens of a token's part.
        # best_of_tokens: [r, 1, n] coverage of the tokens by all chosen tokens.
        best_of_words, best_of_tokens, turn = carry
        gain = jnp.maximum(text_coverage - best_of_words, 0).sum(2)
        gain += jnp.maximum(token_coverage - best_of_tokens, 0).sum(2)
        has_turn = turn == jnp.min(turn, axis=1, keepdims=True)
        choice = jnp.argmax(jnp.where(has_turn, gain, _LOWEST), axis=1)[:, None].astype(jnp.int32)
        at_choice = choice[..., None]
        words_of_choice = jnp.take_along_axis(text_coverage, at_choice, axis=1)
        tokens_of_choice = jnp.take_along_axis(token_coverage, at_choice, axis=1)
        same_part = part == jnp.take_along_axis(part, choice, axis=1)
        best_of_words = jnp.where(
            same_part[..., None], jnp.maximum(best_of_words, words_of_choice), best_of_words
        )
        best_of_tokens = jnp.maximum(best_of_tokens, tokens_of_choice)
        turn = advance_turns(turn, part, choice)
        return (best_of_words, best_of_tokens, turn), choice[:, 0]

    no_tokens = jnp.zeros((len(part), 1, part.shape[1]), jnp.float32)
    start = jnp.zeros_like(text_coverage), no_tokens, turn
    _, order = jax.lax.scan(step, start, length=steps)
    return order.T
