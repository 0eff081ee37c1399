"""SparseVLM: the words of the question that an image speaks to rate its tokens, in stages.

Zhang and others (https://arxiv.org/abs/2410.04417). Text tokens whose embeddings are most like the
image's are *raters*. Behind a few layers the attention that those layers give from the raters to
the visual tokens ranks them, and the best stay. `SparseVLM` (version 1.5) recycles the best of the
others: it clusters them and keeps the mean of each cluster. `SparseVLMv2` (version 2.0, also known
as SparseVLM+) recycles none; it divides the attention by what rotary positions alone would give,
and reads it from the heads that look at the image most.
"""

import dataclasses
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.rotary import rotate
from stepprune_jax.models.vlm import Sequence, last_slots
from stepprune_jax.pruning.base import LayerCut, LayerPruner, Survivors, keep_best
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.schedule import (
    check_layers,
    choose_layers,
    geometric_counts,
    stage_widths,
)

LAYERS = (2, 6, 15)
_EXACT = jax.lax.Precision.HIGHEST
_FAR = jnp.finfo(jnp.float32).max


@dataclasses.dataclass(frozen=True)
class TextRated(LayerPruner):
    """What the versions have in common: raters, and lists of how many tokens to keep.

    Attributes:
        pruning_loc: layers behind which tokens are pruned; None for the authors' 2, 6 and 15, or in
            a model with fewer than 17 layers for those at the same share of its depth.
        sparse_token_list: tokens to keep behind each of them, besides recycled ones; of fewer, all
            but one. None for the authors' lists where the budget is 1/3, 2/9, 1/6 or 1/9 of an
            image's tokens behind their layers, and elsewhere for counts that fall by one ratio to
            meet the budget. Given, it decides, and a budget is but a name.
        average: whether the budget is the mean over layers, as the authors count, who count what a
            layer passes on, or the number of tokens that are left behind the last of `pruning_loc`.
    """

    pruning_loc: tuple[int, ...] | None = None
    sparse_token_list: tuple[int, ...] | None = None
    average: bool = True

    schedules: ClassVar[tuple[str, ...]] = ("sparse_token_list",)
    # The authors' lists for 576 tokens, by the share of them that the budget is.
    lists: ClassVar[dict[Fraction, tuple[int, ...]]]
    # Intermediates of the layer in front of a cut, besides its attention.
    extra_taps: ClassVar[tuple[str, ...]] = ()

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Refuses layers that do not exist, lists that do not fit, and budgets out of reach."""
        super().check(config, num_tokens)
        depth, layers = config.text.num_layers, self._layers(config)
        check_layers(f"{self.name}: pruning_loc", layers, 0, depth - 2)
        values = self.sparse_token_list
        if values is not None and (len(values) != len(layers) or min(values) < 1):
            raise ValueError(
                f"{self.name}: sparse_token_list is {list(values)}, expected {len(layers)} "
                "integers from 1"
            )
        if self._list(config, num_tokens) is not None:
            return
        counts = [num_tokens, *map(sum, self.survivors(config, num_tokens))]
        budget = self.budget.exact_count(num_tokens)
        total = sum(w * n for w, n in zip(stage_widths(layers, depth), counts, strict=True))
        if total > budget * depth if self.average else counts[-1] != budget:
            raise ValueError(
                f"{self.name}: {'a mean of ' if self.average else ''}{self.budget} of {num_tokens} "
                f"tokens is out of reach behind layers {', '.join(map(str, layers))} of {depth}"
            )

    def program(self) -> "TextRated":
        """Drops the schedule: `drop` is given the counts."""
        return dataclasses.replace(
            self, budget=Budget(), pruning_loc=None, sparse_token_list=None, average=True
        )

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns a cut behind each layer of the list; the first one looks at embeddings too."""
        del num_tokens
        cuts = []
        for layer in self._layers(config):
            taps = [Tap("attention", layer), *(Tap(kind, layer) for kind in self.extra_taps)]
            embeddings = [] if cuts else [Tap("hidden", 0)]
            cuts.append(LayerCut(layer + 1, (*taps, *embeddings), "text"))
        return tuple(cuts)

    def survivors(self, config: ModelConfig, num_tokens: int) -> tuple[Survivors, ...]:
        """Returns what is kept, and what is recycled, behind each layer of the list."""
        values, left, before = self._list(config, num_tokens), [], num_tokens
        totals = ()
        if values is None:
            widths = stage_widths(self._layers(config), config.text.num_layers)
            budget = self.budget.exact_count(num_tokens)
            totals = geometric_counts(num_tokens, budget, widths, self.average)
        for number in range(len(self._layers(config))):
            if values is None:
                kept = min(totals[number], before)
                while kept > 1 and kept + self._merged(before - kept) > totals[number]:
                    kept -= 1
            else:
                kept = max(1, min(values[number], before - 1))
            left.append(Survivors(kept, self._merged(before - kept)))
            before = sum(left[-1])
        return tuple(left)

    def drop(
        self,
        params: Any,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Keeps the tokens that the raters attend to most; notes the raters at the first cut."""
        del params
        taps = {name.partition(".")[0]: tap for name, tap in taps.items()}
        if sequence.note is None:
            note = rate_text(taps["hidden"], sequence, taps["attention"].shape[2])
            sequence = sequence._replace(note=note)
        return self._left(sequence, self._score(sequence, taps), count)

    def _score(self, sequence: Sequence, taps: dict[str, Array]) -> Float[Array, "b s"]:
        """The raters' attention, in the mean over heads and raters."""
        return rater_mean(taps["attention"].mean(1), sequence)

    def _left(
        self, sequence: Sequence, score: Float[Array, "b s"], count: Int[Array, "b j"]
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """The rows, and which of their slots are left: the best."""
        return sequence, keep_best(score, sequence.image, count)

    def _merged(self, dropped: int) -> int:
        """Tokens that so many dropped ones are recycled into."""
        del dropped
        return 0

    def _layers(self, config: ModelConfig) -> tuple[int, ...]:
        """The layers behind which tokens are pruned."""
        if self.pruning_loc is not None:
            return self.pruning_loc
        behind = choose_layers(tuple(layer + 1 for layer in LAYERS), config.text.num_layers)
        return tuple(layer - 1 for layer in behind)

    def _list(self, config: ModelConfig, num_tokens: int) -> tuple[int, ...] | None:
        """Tokens of an image to keep at each cut; None if they follow from the budget."""
        if self.sparse_token_list is not None:
            return self.sparse_token_list
        values = self.lists.get(Fraction(self.budget.exact_count(num_tokens), num_tokens))
        if values is None or not self.average or self._layers(config) != LAYERS:
            return None
        return tuple(value * num_tokens // 576 for value in values)


@dataclasses.dataclass(frozen=True)
class SparseVLM(TextRated):
    """Keeps what the raters attend to, and the means of clusters of the best of the rest.

    Attributes:
        noise: largest of the random numbers that are added to densities, so that not all clusters'
            centres tie; the same draw for every image. With 0 ties stay: two tokens that are each
            other's neighbours may both be centres.
    """

    noise: float = 1e-6

    name = "sparsevlm"
    label = "SparseVLM"
    positions: ClassVar[str] = "compact"
    lists: ClassVar[dict[Fraction, tuple[int, ...]]] = {
        Fraction(1, 3): (300, 200, 110),
        Fraction(2, 9): (303, 110, 36),
        Fraction(1, 6): (238, 48, 26),
        Fraction(1, 9): (66, 30, 17),
    }

    def _merged(self, dropped: int) -> int:
        """Clusters of the dropped tokens."""
        return int(num_clusters(dropped)[1])

    def _left(
        self, sequence: Sequence, score: Float[Array, "b s"], count: Int[Array, "b j"]
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """The rows, and which of their slots are left: the best, and clusters of the others."""
        return recycle(sequence, score, count, self.noise)


@dataclasses.dataclass(frozen=True)
class SparseVLMv2(TextRated):
    """Keeps what the raters attend to, by some heads and apart from where it stands.

    Attributes:
        heads: how many heads vote: those with the largest sum of attention from raters to visual
            tokens. All of a model that has fewer.
    """

    heads: int = 14

    name = "sparsevlm_v2"
    label = "SparseVLM v2"
    lists: ClassVar[dict[Fraction, tuple[int, ...]]] = {
        Fraction(1, 3): (300, 200, 118),
        Fraction(2, 9): (238, 108, 60),
        Fraction(1, 6): (246, 54, 28),
        Fraction(1, 9): (66, 34, 20),
    }
    extra_taps: ClassVar[tuple[str, ...]] = ("rotary",)

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Refuses a vote without heads."""
        super().check(config, num_tokens)
        if self.heads < 1:
            raise ValueError(f"sparsevlm_v2: heads is {self.heads}, expected an integer from 1")

    def _score(self, sequence: Sequence, taps: dict[str, Array]) -> Float[Array, "b s"]:
        """The raters' attention over that of rotary positions alone, in the mean over `heads`."""
        attention = without_positions(taps["attention"], taps["rotary"], sequence)
        of_head = jax.vmap(rater_mean, (1, None), 1)(attention, sequence)
        weight = jnp.sum(of_head, axis=2, where=(sequence.image >= 0)[:, None])
        rank = jnp.argsort(jnp.argsort(-weight, axis=1, stable=True), axis=1)
        heads = min(self.heads, of_head.shape[1])
        return jnp.mean(of_head, axis=1, where=(rank < heads)[..., None])


def rate_text(
    embeddings: Float[Array, "b s e"], sequence: Sequence, count: int
) -> Float[Array, "b s"]:
    """Finds the raters: text that the image speaks to more than to text on average.

    Args:
        embeddings: [b, s, e] of all tokens of the rows, V of the visual ones and T of the text
            behind the last of them.
        sequence: the rows.
        count: last slots among which that text is.

    Returns:
        [b, s] 1 for raters: for which the mean of softmax(V T^T) over visual tokens, the softmax
        being over text, exceeds its mean over text. Rows without images have none.
    """
    slots = last_slots(sequence, count)
    real = sequence.length[:, None] - count + jnp.arange(count) >= 0
    visual = sequence.image >= 0
    last = jnp.max(jnp.where(visual, jnp.arange(visual.shape[1]), -1), axis=1, keepdims=True)
    asked = real & (slots > last) & (last >= 0)
    embeddings = embeddings.astype(jnp.float32)
    text = jnp.take_along_axis(embeddings, slots[..., None], axis=1)
    likeness = jnp.einsum("bse,bte->bst", embeddings, text, precision=_EXACT)
    likeness = jnp.where(asked[:, None], likeness, -_FAR)
    share = jnp.where(asked[:, None], jax.nn.softmax(likeness, axis=2), 0)
    rating = _mean(share, visual[..., None], 1)
    rater = asked & (rating > _mean(rating, asked, 1)[:, None])
    rows = jnp.arange(len(visual))[:, None]
    return jnp.zeros(visual.shape).at[rows, slots].max(rater.astype(jnp.float32))


def _mean(x: Array, where: Bool[Array, "..."], axis: int) -> Array:
    """The mean of what is asked for; 0 of nothing."""
    where = jnp.broadcast_to(where, x.shape)
    return jnp.sum(x, axis=axis, where=where) / jnp.maximum(1, where.sum(axis))


def rater_mean(attention: Float[Array, "b t s"], sequence: Sequence) -> Float[Array, "b s"]:
    """Averages the attention [b, t, s] of a row's last t tokens over its raters, `sequence.note`.

    Args:
        attention: from the slots of `last_slots`.
        sequence: the rows.

    Returns:
        [b, s]; 0 without raters.
    """
    assert sequence.note is not None  # from the first cut on
    rater = jnp.take_along_axis(sequence.note, last_slots(sequence, attention.shape[1]), axis=1)
    # Raters are text behind an image, so that slot 0, which may be repeated, is none of them.
    total = jnp.einsum("bt,bts->bs", rater, attention, precision=_EXACT)
    return total / jnp.maximum(1, rater.sum(1, keepdims=True))


def without_positions(
    attention: Float[Array, "b h t s"], angles: Float[Array, "2 b s c"], sequence: Sequence
) -> Float[Array, "b h t s"]:
    """Divides attention weights by the scores that queries and keys of ones would have.

    These scores are products of rotated ones over sqrt(c), without a softmax: they may be negative.

    Args:
        attention: [b, h, t, s] softmax weights from the last t tokens of each row.
        angles: cosine and sine of the rotary angles.
        sequence: the rows.

    Returns:
        [b, h, t, s]; 0 where a score is exactly 0.
    """
    _, b, s, c = angles.shape
    (ones,) = jnp.swapaxes(rotate(jnp.ones((b, 1, s, c)), *angles), 0, 1)
    queries = last_slots(sequence, attention.shape[2])[..., None]
    score = jnp.einsum(
        "btc,bsc->bts", jnp.take_along_axis(ones, queries, axis=1), ones, precision=_EXACT
    )
    score = (score * c**-0.5)[:, None]
    return jnp.where(score == 0, 0, attention / jnp.where(score == 0, 1, score))


def num_clusters(dropped: Int[Array, ""] | int) -> tuple[Any, Any]:
    """Says what is recycled of a number of dropped tokens.

    Args:
        dropped: their number.

    Returns:
        How many of them, a tenth of three, and into how many clusters, a tenth of those; each
        rounded down, plus one. None of none.
    """
    candidates = (3 * dropped // 10 + 1) * (dropped > 0)
    return candidates, (candidates // 10 + 1) * (dropped > 0)


def recycle(
    sequence: Sequence, score: Float[Array, "b s"], count: Int[Array, "b j"], noise: float
) -> tuple[Sequence, Bool[Array, "b s"]]:
    """Keeps the best tokens of each image, and clusters of the best of the others behind them.

    Args:
        sequence: the rows.
        score: [b, s] that tokens are ordered by.
        count: [b, j] how many of each image to keep.
        noise: as in `cluster_and_merge`.

    Returns:
        The rows, in which the clusters of each image stand behind its last token, at the position
        ids of their centres; and which slots of them are left.
    """
    (b, s), j = score.shape, count.shape[1]
    assert sequence.note is not None  # from the first cut on
    keep = keep_best(score, sequence.image, count)
    most_candidates, most = num_clusters(s)

    def of_image(hidden, score, dropped):
        candidates, clusters = num_clusters(dropped.sum())
        order = jnp.argsort(jnp.where(dropped, -score, _FAR), stable=True)[:most_candidates]
        tokens, centre = cluster_and_merge(hidden[order], candidates, clusters, most, noise)
        return tokens, order[centre], jnp.arange(most) < clusters

    is_of = sequence.image[:, None] == jnp.arange(j)[:, None]
    of_row = jax.vmap(of_image, (None, None, 0))
    tokens, centre, real = jax.vmap(of_row)(sequence.hidden, score, is_of & ~keep[:, None])
    tokens, centre, real = (x.reshape(b, j * most, *x.shape[3:]) for x in (tokens, centre, real))

    slots = jnp.arange(s)
    last = jnp.repeat(jnp.max(jnp.where(is_of, slots, -1), axis=2), most, axis=1)
    stays = keep & (slots < sequence.length[:, None])
    place = [jnp.where(stays, 2 * slots, 2 * s), jnp.where(real, 2 * last + 1, 2 * s)]
    order = jnp.argsort(jnp.concatenate(place, axis=1), axis=1, stable=True)[:, :s]

    def put(own: Array, merged: Array, axis: int = 1) -> Array:
        both = jnp.concatenate([own, merged.astype(own.dtype)], axis=axis)
        at = jnp.expand_dims(order, [i for i in range(1, own.ndim) if i != axis])
        return jnp.take_along_axis(both, at, axis=axis)

    image = jnp.broadcast_to(jnp.repeat(jnp.arange(j), most), (b, j * most))
    position = jnp.take_along_axis(sequence.position, centre[:, None], axis=2)
    left = sequence._replace(
        hidden=put(sequence.hidden, tokens),
        position=put(sequence.position, position, 2),
        image=put(sequence.image, image),
        index=put(sequence.index, jnp.full((b, j * most), -1)),
        note=put(sequence.note, jnp.zeros((b, j * most))),
    )
    return left, slots < (stays.sum(1) + real.sum(1))[:, None]


def cluster_and_merge(
    x: Float[Array, "m e"],
    count: Int[Array, ""] | int,
    clusters: Int[Array, ""] | int,
    most: int,
    noise: float = 0.0,
) -> tuple[Float[Array, "most e"], Int[Array, "most"]]:
    """Clusters tokens by density peaks and nearest neighbours (DPC-KNN), and averages clusters.

    A token's density is exp(-mean squared distance to its `clusters` nearest tokens, itself among
    them), its distance that to the next denser token, or the largest of all if there is none.
    Those with the largest products are centres; every other token joins the nearest centre.
    Distances are Euclidean, over sqrt(e). Ties go to the first.

    Args:
        x: [m, e] tokens.
        count: how many of them are real, a prefix.
        clusters: how many to make, at most that many.
        most: static size of the result.
        noise: largest of the random numbers that are added to densities.

    Returns:
        [most, e] float32 sums over the tokens of each cluster, over their number plus 1e-6; and
        [most] the centres' indices. What lies behind `clusters` is void.
    """
    x, m = x.astype(jnp.float32), x.shape[0]
    real, wanted = jnp.arange(m) < count, jnp.arange(most) < clusters
    distance = jnp.sqrt(jnp.sum(jnp.square(x[:, None] - x), axis=-1) / x.shape[1])
    nearest = -jax.lax.top_k(jnp.where(real, -distance, -_FAR), most)[0]
    nearest = jnp.sum(jnp.square(jnp.where(wanted, nearest, 0)), axis=1)
    density = jnp.exp(-nearest / jnp.maximum(clusters, 1)) + noise * _uniform(m)
    denser = real & (density > density[:, None])
    farthest = jnp.max(jnp.where(real & real[:, None], distance, 0))
    peak = density * jnp.min(jnp.where(denser, distance, farthest), axis=1)
    centre = jax.lax.top_k(jnp.where(real, peak, -1), most)[1]
    to_centre = jnp.where(wanted[:, None], distance[centre], _FAR)
    cluster = jnp.argmin(to_centre, axis=0)
    cluster = cluster.at[jnp.where(wanted, centre, m)].set(jnp.arange(most), mode="drop")
    member = jax.nn.one_hot(cluster, most) * real[:, None]
    total = jnp.einsum("mc,me->ce", member, jnp.where(real[:, None], x, 0), precision=_EXACT)
    return total / (member.sum(0)[:, None] + 1e-6), centre


def _uniform(count: int) -> Float[Array, "count"]:
    """Random numbers in [0, 1), each of which depends on its place alone."""
    draw = jax.vmap(lambda place: jax.random.uniform(jax.random.fold_in(jax.random.key(0), place)))
    return draw(jnp.arange(count))
