"""Random tokens, the baseline that any method has to beat."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Int

from stepprune_jax.pruning.base import Params, Ranker, Ranking, View
from stepprune_jax.pruning.ordering import by_score


@dataclasses.dataclass(frozen=True)
class Random(Ranker):
    """Keeps tokens drawn without replacement.

    Attributes:
        seed: seed of the draws. A row's draw depends only on the seed and its number.
    """

    seed: int = 0

    name = "random"
    label = "random"
    is_random: ClassVar[bool] = True
    version: ClassVar[int] = 2

    def rank(self, params: Params, view: View, steps: int) -> Ranking:
        """Orders the tokens of each row at random."""
        n = view.tokens.shape[1]
        sizes = jnp.full(len(view.number), n) if view.valid is None else view.valid.sum(1)
        scores = random_scores(
            jax.random.key(self.seed, impl="threefry2x32"), view.number, sizes, n
        )
        # Ascending, as is usual for a random permutation by sorting noise.
        return Ranking(by_score(-scores, view.valid)[:, :steps])


def random_scores(
    key: Array, number: Int[Array, "r"], sizes: Int[Array, "r"], num_tokens: int
) -> Array:
    """Draws a number in [0, 1) for each token, independent of other rows and of padding.

    Row i of a set of images of n tokens gets row i of `jax.random.uniform(key, (rows, n))`, of a
    "threefry2x32" key, without drawing the rows before it.
    """
    first, second = jax.random.key_data(key)
    # 64-bit counters in two words: number * size + position.
    low = number.astype(jnp.uint32)[:, None] * sizes.astype(jnp.uint32)[:, None]
    high = _high_word(number.astype(jnp.uint32), sizes.astype(jnp.uint32))[:, None]
    position = jnp.arange(num_tokens, dtype=jnp.uint32)
    counter = low + position
    high = high + (counter < low).astype(jnp.uint32)
    words = [jnp.broadcast_to(word, counter.shape) for word in (first, second, high, counter)]
    left, right = threefry2x32_p.bind(*words)
    bits = (left ^ right) >> 9 | jnp.uint32(0x3F800000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - 1


def _high_word(a: Array, b: Array) -> Array:
    """Returns the upper 32 bits of the product of two 32-bit numbers, b below 2**16."""
    upper, lower = a >> 16, a & 0xFFFF
    return (upper * b + (lower * b >> 16)) >> 16
