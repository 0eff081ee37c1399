"""SparseVLM: ranks visual tokens by the attention of relevant question words, in stages.

Zhang et al. (https://arxiv.org/abs/2410.04417). *Raters* are the text tokens whose embeddings are
most similar to the image's. After some layers, visual tokens are ranked by the attention of the
raters in these layers, and the best tokens remain. `SparseVLM` (version 1.5) recycles the best
dropped tokens: it clusters them and keeps the mean of each cluster. `SparseVLMv2` (version 2.0,
also known as SparseVLM+) recycles no tokens. It divides the attention by the scores that the rotary
positions cause, and uses the heads with the largest attention to the image.
"""

import dataclasses
from fractions import Fraction
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.rotary import rotate
from stepprune_jax.models.sequence import Sequence, last_slots
from stepprune_jax.policy.jax_settings import THREEFRY
from stepprune_jax.pruning.base import LayerCut, LayerPruner, Schedule, Survivors
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.ordering import keep_best
from stepprune_jax.pruning.schedule import (
    are_layers,
    choose_layers,
    geometric_counts,
    stage_widths,
)

LAYERS = (2, 6, 15)
_EXACT = jax.lax.Precision.HIGHEST
_FAR = jnp.finfo(jnp.float32).max
Count = TypeVar("Count", Int[Array, ""], int)


@dataclasses.dataclass(frozen=True)
class TextRated(LayerPruner):
    """Base class of both versions: raters, and lists of token counts.

    Attributes:
        pruning_loc: layers after which tokens are pruned; None for the authors' 2, 6 and 15, or the
            same relative depths in a model with fewer than 17 layers.
        sparse_token_list: number of tokens to keep after each of these layers, not counting
            recycled tokens; at least one token is always dropped. None selects the authors' lists
            for budgets of 1/3, 2/9, 1/6 or 1/9 of an image's tokens at their layers, and otherwise
            counts that fall by a constant ratio and meet the budget. If given, the list replaces
            the budget, which is then only a label.
        average: whether the budget is the mean over layers of the number of tokens after each
            layer, like the authors' budgets, or the number of tokens after the last pruning.
    """

    pruning_loc: tuple[int, ...] | None = None
    sparse_token_list: tuple[int, ...] | None = None
    average: bool = True

    schedules: ClassVar[tuple[str, ...]] = ("sparse_token_list",)
    # The authors' lists for images of 576 tokens, by the budget as a fraction of the tokens.
    lists: ClassVar[dict[Fraction, tuple[int, ...]]]
    # Intermediates of the layer before a cut, in addition to its attention.
    extra_taps: ClassVar[tuple[str, ...]] = ()

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects layers that do not exist, ill-formed lists, and unreachable budgets."""
        super().check(config, num_tokens)
        depth, layers = config.text.num_layers, self._layers(config)
        is_valid = are_layers(layers, 0, depth - 2)
        self.expect("pruning_loc", is_valid, f"ascending layers from 0 to {depth - 2}")
        values = self.sparse_token_list
        is_valid = values is None or (len(values) == len(layers) and min(values) >= 1)
        self.expect("sparse_token_list", is_valid, f"{len(layers)} integers from 1")
        if self._list(config, num_tokens) is not None:
            return
        counts = [num_tokens, *map(sum, self.schedule(config, num_tokens).after)]
        budget = self.budget.exact_count(num_tokens)
        total = sum(w * n for w, n in zip(stage_widths(layers, depth), counts, strict=True))
        meets_budget = total <= budget * depth if self.average else counts[-1] == budget
        quantity = "mean over layers" if self.average else "number"
        self.expect(
            "budget",
            meets_budget,
            f"a larger {quantity}: it prunes after {layers} of {depth} layers",
        )

    def program(self) -> "TextRated":
        """Returns a copy without the schedule; `drop` receives the counts as an argument."""
        return dataclasses.replace(
            self, budget=Budget(), pruning_loc=None, sparse_token_list=None, average=True
        )

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns a cut after each listed layer; the first cut also reads embeddings."""
        cuts = []
        for layer in self._layers(config):
            taps = [Tap("attention", layer), *(Tap(kind, layer) for kind in self.extra_taps)]
            first_taps = [] if cuts else [Tap("hidden", 0)]
            cuts.append(LayerCut(layer + 1, (*taps, *first_taps), "text"))
        return tuple(cuts)

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Returns the numbers of kept and recycled tokens after each listed layer."""
        values, survivors, num_before = self._list(config, num_tokens), [], num_tokens
        stage_counts = ()
        if values is None:
            widths = stage_widths(self._layers(config), config.text.num_layers)
            budget = self.budget.exact_count(num_tokens)
            stage_counts = geometric_counts(num_tokens, budget, widths, self.average)
        for i in range(len(self._layers(config))):
            if values is None:
                kept = min(stage_counts[i], num_before)
                while kept > 1 and kept + self._merged(num_before - kept) > stage_counts[i]:
                    kept -= 1
            else:
                kept = max(0, min(values[i], num_before - 1))
            survivors.append(Survivors(kept, self._merged(num_before - kept)))
            num_before = sum(survivors[-1])
        return Schedule(num_tokens, num_tokens, tuple(survivors))

    def drop(
        self,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Keeps the tokens with the largest attention of the raters.

        The first cut computes the raters and stores them in `sequence.note`.
        """
        taps = {name.partition(".")[0]: tap for name, tap in taps.items()}
        if sequence.note is None:
            note = rate_text(taps["hidden"], sequence, taps["attention"].shape[2])
            sequence = sequence._replace(note=note)
        return self._left(sequence, self.scores(sequence, taps), count)

    def scores(self, sequence: Sequence, taps: dict[str, Array]) -> Float[Array, "b s"]:
        """Averages the raters' attention over heads and raters."""
        return rater_mean(taps["attention"].mean(1), sequence)

    def _left(
        self, sequence: Sequence, score: Float[Array, "b s"], count: Int[Array, "b j"]
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Returns the sequence, and a mask of the best tokens."""
        return sequence, keep_best(score, sequence.image, count)

    def _merged(self, dropped: int) -> int:
        """Returns the number of recycled tokens, given the number of dropped tokens."""
        return 0

    def _layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Returns the layers after which tokens are pruned."""
        if self.pruning_loc is not None:
            return self.pruning_loc
        first_layers_after = choose_layers(
            tuple(layer + 1 for layer in LAYERS), config.text.num_layers
        )
        return tuple(layer - 1 for layer in first_layers_after)

    def _list(self, config: ModelConfig, num_tokens: int) -> tuple[int, ...] | None:
        """Returns the number of tokens to keep at each cut; None if the budget determines it."""
        if self.sparse_token_list is not None:
            return self.sparse_token_list
        values = self.lists.get(Fraction(self.budget.exact_count(num_tokens), num_tokens))
        if values is None or not self.average or self._layers(config) != LAYERS:
            return None
        return tuple(max(1, value * num_tokens // 576) for value in values)


@dataclasses.dataclass(frozen=True)
class SparseVLM(TextRated):
    """Keeps the tokens that raters attend to, and means of clusters of the best dropped tokens.

    Attributes:
        noise: upper bound of random numbers that are added to densities to break ties between
            cluster centres; the same numbers for every image. With 0, ties remain, and two
            neighbouring tokens may both be centres.
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

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Also rejects negative noise."""
        super().check(config, num_tokens)
        self.expect("noise", self.noise >= 0, "0 or more")

    def _merged(self, dropped: int) -> int:
        """Returns the number of clusters of the dropped tokens."""
        return int(num_clusters(dropped)[1])

    def _left(
        self, sequence: Sequence, score: Float[Array, "b s"], count: Int[Array, "b j"]
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Returns the sequence with clusters of dropped tokens, and a mask of its tokens."""
        return recycle(sequence, score, count, self.noise)


@dataclasses.dataclass(frozen=True)
class SparseVLMv2(TextRated):
    """Keeps the tokens that raters attend to in some heads, corrected for positions.

    Attributes:
        heads: number of heads that are averaged: the heads with the largest total attention of the
            raters to visual tokens. A model with fewer heads uses all of them.
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
        """Also rejects fewer than one head."""
        super().check(config, num_tokens)
        self.expect("heads", self.heads >= 1, "an integer from 1")

    def scores(self, sequence: Sequence, taps: dict[str, Array]) -> Float[Array, "b s"]:
        """Averages the raters' position-corrected attention over the `heads` best heads."""
        attention = without_positions(taps["attention"], taps["rotary"], sequence)
        head_scores = jax.vmap(rater_mean, (1, None), 1)(attention, sequence)
        weight = jnp.sum(head_scores, axis=2, where=(sequence.image >= 0)[:, None])
        rank = jnp.argsort(jnp.argsort(-weight, axis=1, stable=True), axis=1)
        heads = min(self.heads, head_scores.shape[1])
        return jnp.mean(head_scores, axis=1, where=(rank < heads)[..., None])


def rate_text(
    embeddings: Float[Array, "b s e"], sequence: Sequence, count: int
) -> Float[Array, "b s"]:
    """Marks the raters with 1: text tokens with above-average relevance to the image.

    The relevance of a text token is softmax(V T^T), averaged over visual tokens, where V are the
    embeddings of visual tokens and T the embeddings of text; the softmax is over text. Only text
    after the last visual token and among the last `count` slots counts. Rows without images have no
    raters.

    Args:
        embeddings: [b, s, e] input embeddings of the language model.
        sequence: the rows.
        count: number of last slots that may be raters.
    """
    slots = last_slots(sequence, count)
    real = sequence.length[:, None] - count + jnp.arange(count) >= 0
    visual = sequence.image >= 0
    last_visual = jnp.max(jnp.where(visual, jnp.arange(visual.shape[1]), -1), axis=1, keepdims=True)
    is_question = real & (slots > last_visual) & (last_visual >= 0)
    embeddings = embeddings.astype(jnp.float32)
    text = jnp.take_along_axis(embeddings, slots[..., None], axis=1)
    similarity = jnp.einsum("bse,bte->bst", embeddings, text, precision=_EXACT)
    similarity = jnp.where(is_question[:, None], similarity, -_FAR)
    probability = jnp.where(is_question[:, None], jax.nn.softmax(similarity, axis=2), 0)
    rating = _mean(probability, visual[..., None], 1)
    is_rater = is_question & (rating > _mean(rating, is_question, 1)[:, None])
    rows = jnp.arange(len(visual))[:, None]
    return jnp.zeros(visual.shape).at[rows, slots].max(is_rater.astype(jnp.float32))


def _mean(x: Array, where: Bool[Array, "..."], axis: int) -> Array:
    """Returns the mean of x under a mask; 0 if the mask is empty."""
    where = jnp.broadcast_to(where, x.shape)
    return jnp.sum(x, axis=axis, where=where) / jnp.maximum(1, where.sum(axis))


def rater_mean(attention: Float[Array, "b t s"], sequence: Sequence) -> Float[Array, "b s"]:
    """Returns the attention of a row's last t tokens, averaged over raters; 0 without raters."""
    assert sequence.note is not None  # from the first cut on
    is_rater = jnp.take_along_axis(sequence.note, last_slots(sequence, attention.shape[1]), axis=1)
    # Raters are text after an image, so slot 0, which may be repeated, is not among them.
    total = jnp.einsum("bt,bts->bs", is_rater, attention, precision=_EXACT)
    return total / jnp.maximum(1, is_rater.sum(1, keepdims=True))


def without_positions(
    attention: Float[Array, "b h t s"], angles: Float[Array, "2 b s c"], sequence: Sequence
) -> Float[Array, "b h t s"]:
    """Divides attention by the scores that rotary positions cause.

    The scores are those of queries and keys of ones: products of rotated ones over sqrt(c), without
    a softmax. They may be negative. Where a score is exactly 0, the result is 0.
    """
    _, b, s, c = angles.shape
    (rotated_ones,) = jnp.swapaxes(rotate(jnp.ones((b, 1, s, c)), *angles), 0, 1)
    queries = last_slots(sequence, attention.shape[2])[..., None]
    score = jnp.einsum(
        "btc,bsc->bts",
        jnp.take_along_axis(rotated_ones, queries, axis=1),
        rotated_ones,
        precision=_EXACT,
    )
    score = (score * c**-0.5)[:, None]
    return jnp.where(score == 0, 0, attention / jnp.where(score == 0, 1, score))


def num_clusters(dropped: Count) -> tuple[Count, Count]:
    """Returns the numbers of candidates for recycling and of clusters.

    Candidates are three tenths of the dropped tokens, and clusters a tenth of the candidates, both
    rounded down plus one. Both are 0 if no token is dropped.
    """
    candidates = (3 * dropped // 10 + 1) * (dropped > 0)
    return candidates, (candidates // 10 + 1) * (dropped > 0)


def recycle(
    sequence: Sequence, score: Float[Array, "b s"], count: Int[Array, "b j"], noise: float
) -> tuple[Sequence, Bool[Array, "b s"]]:
    """Keeps the best tokens of each image, followed by clusters of the best dropped tokens.

    Clusters take the position ids of their centres.

    Args:
        sequence: the rows.
        score: [b, s] score of each slot.
        count: [b, j] number of tokens to keep of each image.
        noise: upper bound of the random numbers that break ties.

    Returns:
        The sequence with clusters after each image's kept tokens, and a mask of its tokens.
    """
    (b, s), j = score.shape, count.shape[1]
    assert sequence.note is not None  # from the first cut on
    keep = keep_best(score, sequence.image, count)
    max_candidates, max_clusters = num_clusters(s)

    hidden, deep, combined = sequence.hidden, sequence.deep, None
    if deep is not None:
        combined = jnp.concatenate([hidden, deep.reshape(b, s, -1)], axis=2)

    def cluster_image(hidden, combined, score, dropped):
        candidates, clusters = num_clusters(dropped.sum())
        order = jnp.argsort(jnp.where(dropped, -score, _FAR), stable=True)[:max_candidates]
        merged = None if combined is None else combined[order]
        tokens, centre = cluster_and_merge(
            hidden[order], candidates, clusters, max_clusters, noise=noise, values=merged
        )
        return tokens, order[centre], jnp.arange(max_clusters) < clusters

    is_in_image = sequence.image[:, None] == jnp.arange(j)[:, None]
    cluster_row = jax.vmap(cluster_image, (None, None, None, 0))
    tokens, centre, is_cluster = jax.vmap(cluster_row)(
        hidden, combined, score, is_in_image & ~keep[:, None]
    )
    tokens, centre, is_cluster = (
        x.reshape(b, j * max_clusters, *x.shape[3:]) for x in (tokens, centre, is_cluster)
    )

    slots = jnp.arange(s)
    last_slot = jnp.repeat(jnp.max(jnp.where(is_in_image, slots, -1), axis=2), max_clusters, axis=1)
    is_kept = keep & (slots < sequence.length[:, None])
    sort_keys = [
        jnp.where(is_kept, 2 * slots, 2 * s),
        jnp.where(is_cluster, 2 * last_slot + 1, 2 * s),
    ]
    order = jnp.argsort(jnp.concatenate(sort_keys, axis=1), axis=1, stable=True)[:, :s]

    def insert(own: Array, merged: Array, axis: int = 1) -> Array:
        both = jnp.concatenate([own, merged.astype(own.dtype)], axis=axis)
        at = jnp.expand_dims(order, [i for i in range(1, own.ndim) if i != axis])
        return jnp.take_along_axis(both, at, axis=axis)

    image = jnp.broadcast_to(jnp.repeat(jnp.arange(j), max_clusters), (b, j * max_clusters))
    position = jnp.take_along_axis(sequence.position, centre[:, None], axis=2)
    if deep is not None:
        merged = tokens[..., hidden.shape[2] :]
        deep = insert(deep, merged.reshape(b, j * max_clusters, *deep.shape[2:]))
    merged_sequence = sequence._replace(
        hidden=insert(hidden, tokens[..., : hidden.shape[2]]),
        deep=deep,
        position=insert(sequence.position, position, 2),
        image=insert(sequence.image, image),
        index=insert(sequence.index, jnp.full((b, j * max_clusters), -1)),
        note=insert(sequence.note, jnp.zeros((b, j * max_clusters))),
    )
    return merged_sequence, slots < (is_kept.sum(1) + is_cluster.sum(1))[:, None]


def cluster_and_merge(
    x: Float[Array, "m e"],
    count: Int[Array, ""] | int,
    clusters: Int[Array, ""] | int,
    max_clusters: int,
    *,
    noise: float = 0.0,
    values: Float[Array, "m w"] | None = None,
) -> tuple[Float[Array, "most w"], Int[Array, "most"]]:
    """Clusters tokens by density peaks and nearest neighbours (DPC-KNN), and averages clusters.

    The density of a token is exp(-mean squared distance to its `clusters` nearest tokens, including
    itself), plus noise. Its peak distance is the distance to the nearest denser token; the densest
    token gets the largest distance of all. The tokens with the largest product of density and peak
    distance are centres. Every other token joins the nearest centre. Distances are Euclidean,
    divided by sqrt(e). Ties go to the first token.

    Args:
        x: [m, e] tokens to compare.
        count: number of real tokens, which come first.
        clusters: number of clusters.
        max_clusters: static bound on the number of clusters.
        noise: upper bound of the random numbers that break ties.
        values: [m, w] values to average; None averages x.

    Returns:
        The sum over each cluster divided by its size plus 1e-6, and the index of its centre. Only
        the first `clusters` entries are defined.
    """
    x, m = x.astype(jnp.float32), x.shape[0]
    values = x if values is None else values.astype(jnp.float32)
    is_real, is_cluster = jnp.arange(m) < count, jnp.arange(max_clusters) < clusters
    distance = jnp.sqrt(jnp.sum(jnp.square(x[:, None] - x), axis=-1) / x.shape[1])
    neighbour_distance = -jax.lax.top_k(jnp.where(is_real, -distance, -_FAR), max_clusters)[0]
    neighbour_distance = jnp.sum(jnp.square(jnp.where(is_cluster, neighbour_distance, 0)), axis=1)
    density = jnp.exp(-neighbour_distance / jnp.maximum(clusters, 1)) + noise * _uniform(m)
    is_denser = is_real & (density > density[:, None])
    max_distance = jnp.max(jnp.where(is_real & is_real[:, None], distance, 0))
    peak = density * jnp.min(jnp.where(is_denser, distance, max_distance), axis=1)
    centre = jax.lax.top_k(jnp.where(is_real, peak, -1), max_clusters)[1]
    to_centre = jnp.where(is_cluster[:, None], distance[centre], _FAR)
    cluster = jnp.argmin(to_centre, axis=0)
    cluster = cluster.at[jnp.where(is_cluster, centre, m)].set(
        jnp.arange(max_clusters), mode="drop"
    )
    membership = jax.nn.one_hot(cluster, max_clusters) * is_real[:, None]
    total = jnp.einsum(
        "mc,me->ce", membership, jnp.where(is_real[:, None], values, 0), precision=_EXACT
    )
    return total / (membership.sum(0)[:, None] + 1e-6), centre


def _uniform(count: int) -> Float[Array, "count"]:
    """Returns random numbers in [0, 1), each of which depends only on its index."""
    key = jax.random.key(0, impl=THREEFRY)
    sample = jax.vmap(lambda index: jax.random.uniform(jax.random.fold_in(key, index)))
    return sample(jnp.arange(count))
