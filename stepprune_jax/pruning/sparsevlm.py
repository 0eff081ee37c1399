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
        """Counts the kept and recycled tokens after each listed layer.

        Args:
            config: the model's configuration.
            num_tokens: number of tokens of the image.

        Returns:
            The counts: from a list of kept tokens, if there is one, or from the budget.
        """
        list_counts, survivors, num_before = self._list(config, num_tokens), [], num_tokens
        total_counts = ()
        if list_counts is None:
            widths = stage_widths(self._layers(config), config.text.num_layers)
            budget = self.budget.exact_count(num_tokens)
            total_counts = geometric_counts(num_tokens, budget, widths, self.average)
        for stage in range(len(self._layers(config))):
            if list_counts is None:
                # Kept and recycled tokens together must not exceed the stage's count.
                num_kept = min(total_counts[stage], num_before)
                while num_kept > 1 and (
                    num_kept + self._count_recycled(num_before - num_kept) > total_counts[stage]
                ):
                    num_kept -= 1
            else:
                num_kept = max(0, min(list_counts[stage], num_before - 1))
            survivors.append(Survivors(num_kept, self._count_recycled(num_before - num_kept)))
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
        return self._keep_and_recycle(sequence, self.scores(sequence, taps), count)

    def scores(self, sequence: Sequence, taps: dict[str, Array]) -> Float[Array, "b s"]:
        """Averages the raters' attention over heads and raters."""
        return rater_mean(taps["attention"].mean(1), sequence)

    def _keep_and_recycle(
        self, sequence: Sequence, score: Float[Array, "b s"], count: Int[Array, "b j"]
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Returns the sequence, and a mask of the best tokens."""
        return sequence, keep_best(score, sequence.image, count)

    def _count_recycled(self, num_dropped: int) -> int:
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
            cluster centers; the same numbers for every image. With 0, ties remain, and two
            neighboring tokens may both be centers.
    """

    noise: float = 1e-6

    name = "sparsevlm"
    label = "SparseVLM"
    reads_videos: ClassVar[bool] = False
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

    def _count_recycled(self, num_dropped: int) -> int:
        """Returns the number of clusters of the dropped tokens."""
        return int(num_clusters(num_dropped)[1])

    def _keep_and_recycle(
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
    reads_videos: ClassVar[bool] = False
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
    """Marks the raters: text tokens with above-average relevance to the image.

    The relevance of a text token is softmax(V T^T), averaged over visual tokens. V are the
    embeddings of visual tokens, T the embeddings of the question, and the softmax is over the
    question. The question is the text after the last visual token, within the last `count` tokens.
    Sequences without images have no raters.

    Args:
        embeddings: [b, s, e] input embeddings of the s slots (padded positions) of b sequences.
        sequence: the sequences, with lengths and the image of each slot.
        count: number t of last tokens that may be raters.

    Returns:
        [b, s] float32; 1 at raters, 0 elsewhere.
    """
    slots = last_slots(sequence, count)  # [b, t]
    # A sequence shorter than t repeats its first slot, which must count only once.
    slot_exists = sequence.length[:, None] - count + jnp.arange(count) >= 0
    is_visual = sequence.image >= 0
    all_slots = jnp.arange(is_visual.shape[1])
    last_visual_slot = jnp.max(jnp.where(is_visual, all_slots, -1), axis=1, keepdims=True)
    has_image = last_visual_slot >= 0
    is_question = slot_exists & (slots > last_visual_slot) & has_image
    embeddings = embeddings.astype(jnp.float32)
    text = jnp.take_along_axis(embeddings, slots[..., None], axis=1)
    similarity = jnp.einsum("bse,bte->bst", embeddings, text, precision=_EXACT)
    similarity = jnp.where(is_question[:, None], similarity, -_FAR)
    probability = jnp.where(is_question[:, None], jax.nn.softmax(similarity, axis=2), 0)
    relevance = _masked_mean(probability, is_visual[..., None], 1)
    is_rater = is_question & (relevance > _masked_mean(relevance, is_question, 1)[:, None])
    row_index = jnp.arange(len(is_visual))[:, None]
    # `max` keeps a rater's 1 if another entry refers to the same slot.
    return jnp.zeros(is_visual.shape).at[row_index, slots].max(is_rater.astype(jnp.float32))


def _masked_mean(values: Array, mask: Bool[Array, "..."], axis: int) -> Array:
    """Returns the mean of the values under a mask; 0 if the mask is empty."""
    mask = jnp.broadcast_to(mask, values.shape)
    return jnp.sum(values, axis=axis, where=mask) / jnp.maximum(1, mask.sum(axis))


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
    """Divides attention by the part of the score that only the rotary positions cause.

    This position score is the attention logit of a query and a key whose channels are all 1: the
    product of the rotated vectors over sqrt(c), without a softmax. It may be negative.

    Args:
        attention: [b, h, t, s] attention of the last t tokens of each sequence in h heads.
        angles: [2, b, s, c] cosine and sine of the rotary angles of each slot.
        sequence: the sequences.

    Returns:
        [b, h, t, s] quotients; 0 where the position score is exactly 0.
    """
    _, b, s, c = angles.shape
    rotated_ones = rotate(jnp.ones((b, 1, s, c)), *angles)[:, 0]
    query_slots = last_slots(sequence, attention.shape[2])[..., None]
    query = jnp.take_along_axis(rotated_ones, query_slots, axis=1)
    score = jnp.einsum("btc,bsc->bts", query, rotated_ones, precision=_EXACT)
    score = (score * c**-0.5)[:, None]
    return jnp.where(score == 0, 0, attention / jnp.where(score == 0, 1, score))


def num_clusters(dropped: Count) -> tuple[Count, Count]:
    """Returns the numbers of candidates for recycling and of clusters.

    Candidates are three tenths of the dropped tokens, and clusters a tenth of the candidates, both
    rounded down plus one. Both are 0 if no token is dropped.
    """
    candidates = (3 * dropped // 10 + 1) * (dropped > 0)
    return candidates, (candidates // 10 + 1) * (dropped > 0)


def _order_with_clusters(
    is_kept: Bool[Array, "b s"], is_cluster: Bool[Array, "b c"], is_in_image: Bool[Array, "b j s"]
) -> Int[Array, "b s"]:
    """Orders kept slots and clusters, each image's clusters after its last slot.

    Kept slots have even sort keys. The clusters of an image have the odd key after the image's last
    slot. The largest key sorts dropped slots and absent clusters last.

    Args:
        is_kept: [b, s] True at the slots that remain.
        is_cluster: [b, c] True at real clusters; c / j for each of the j images, in order.
        is_in_image: [b, j, s] True at the slots of each image.

    Returns:
        [b, s] indices into slots followed by clusters, s + c in all.
    """
    (_, j, s), num_cluster_slots = is_in_image.shape, is_cluster.shape[1]
    slots = jnp.arange(s)
    last_slot = jnp.max(jnp.where(is_in_image, slots, -1), axis=2)
    last_slot = jnp.repeat(last_slot, num_cluster_slots // j, axis=1)
    sort_keys = [
        jnp.where(is_kept, 2 * slots, 2 * s),
        jnp.where(is_cluster, 2 * last_slot + 1, 2 * s),
    ]
    return jnp.argsort(jnp.concatenate(sort_keys, axis=1), axis=1, stable=True)[:, :s]


def recycle(
    sequence: Sequence, score: Float[Array, "b s"], count: Int[Array, "b j"], noise: float
) -> tuple[Sequence, Bool[Array, "b s"]]:
    """Keeps the best tokens of each image, followed by clusters of the best dropped tokens.

    A cluster becomes one token, the mean of its tokens, with the position ids of its center.

    Args:
        sequence: b padded sequences of s slots (positions), with j images each.
        score: [b, s] score of each slot.
        count: [b, j] number of tokens to keep of each image, without clusters.
        noise: upper bound of the random numbers that break ties.

    Returns:
        The sequences with clusters after each image's kept tokens, and [b, s] True at their tokens,
        which come before the padding.
    """
    (b, s), j = score.shape, count.shape[1]
    assert sequence.note is not None  # from the first cut on
    keep = keep_best(score, sequence.image, count)
    # Static bounds; the numbers of clusters of an image depend on its number of dropped tokens.
    max_candidates, max_clusters = num_clusters(s)

    # Tokens are compared by hidden states. DeepStack features are averaged with them.
    hidden, deep, hidden_and_deep = sequence.hidden, sequence.deep, None
    if deep is not None:
        hidden_and_deep = jnp.concatenate([hidden, deep.reshape(b, s, -1)], axis=2)

    def cluster_image(hidden, hidden_and_deep, score, is_dropped):
        num_candidates, clusters = num_clusters(is_dropped.sum())
        best_dropped = jnp.argsort(jnp.where(is_dropped, -score, _FAR), stable=True)
        candidates = best_dropped[:max_candidates]
        values = None if hidden_and_deep is None else hidden_and_deep[candidates]
        means, centre = cluster_and_merge(
            hidden[candidates], num_candidates, clusters, max_clusters, noise=noise, values=values
        )
        return means, candidates[centre], jnp.arange(max_clusters) < clusters

    is_in_image = sequence.image[:, None] == jnp.arange(j)[:, None]
    cluster_sequence = jax.vmap(cluster_image, (None, None, None, 0))
    means, centre, is_cluster = jax.vmap(cluster_sequence)(
        hidden, hidden_and_deep, score, is_in_image & ~keep[:, None]
    )
    means, centre, is_cluster = (
        x.reshape(b, j * max_clusters, *x.shape[3:]) for x in (means, centre, is_cluster)
    )

    is_kept = keep & (jnp.arange(s) < sequence.length[:, None])
    order = _order_with_clusters(is_kept, is_cluster, is_in_image)

    def insert(slot_values: Array, cluster_values: Array, axis: int = 1) -> Array:
        """Inserts the values of clusters into the values of slots along an axis."""
        values = jnp.concatenate([slot_values, cluster_values.astype(slot_values.dtype)], axis=axis)
        other_axes = [i for i in range(1, slot_values.ndim) if i != axis]
        return jnp.take_along_axis(values, jnp.expand_dims(order, other_axes), axis=axis)

    image = jnp.broadcast_to(jnp.repeat(jnp.arange(j), max_clusters), (b, j * max_clusters))
    position = jnp.take_along_axis(sequence.position, centre[:, None], axis=2)
    if deep is not None:
        deep_means = means[..., hidden.shape[2] :]
        deep = insert(deep, deep_means.reshape(b, j * max_clusters, *deep.shape[2:]))
    merged_sequence = sequence._replace(
        hidden=insert(hidden, means[..., : hidden.shape[2]]),
        deep=deep,
        position=insert(sequence.position, position, 2),
        image=insert(sequence.image, image),
        index=insert(sequence.index, jnp.full((b, j * max_clusters), -1)),
        note=insert(sequence.note, jnp.zeros((b, j * max_clusters))),
    )
    return merged_sequence, jnp.arange(s) < (is_kept.sum(1) + is_cluster.sum(1))[:, None]


def cluster_and_merge(
    x: Float[Array, "m e"],
    count: Int[Array, ""] | int,
    clusters: Int[Array, ""] | int,
    max_clusters: int,
    *,
    noise: float = 0.0,
    values: Float[Array, "m w"] | None = None,
) -> tuple[Float[Array, "g w"], Int[Array, "g"]]:
    """Clusters tokens by density peaks and nearest neighbors (DPC-KNN), and averages clusters.

    The density of a token is exp(-mean squared distance to its `clusters` nearest tokens, including
    itself), plus noise. Its peak distance is the distance to the nearest denser token; the densest
    token gets the largest distance of all. The tokens with the largest product of density and peak
    distance are centers. Every other token joins the nearest center. Distances are Euclidean,
    divided by sqrt(e). Ties go to the first token.

    Args:
        x: [m, e] tokens to compare, followed by padding.
        count: number of tokens without padding.
        clusters: number of clusters.
        max_clusters: static bound g on the number of clusters.
        noise: upper bound of the random numbers that break ties.
        values: [m, w] values to average; None averages x.

    Returns:
        [g, w] sum over each cluster divided by its size plus 1e-6, as in the authors' program; and
        [g] index of the cluster's center. Only the first `clusters` entries are defined.
    """
    x, m = x.astype(jnp.float32), x.shape[0]
    values = x if values is None else values.astype(jnp.float32)
    is_token, is_cluster = jnp.arange(m) < count, jnp.arange(max_clusters) < clusters
    distance = jnp.sqrt(jnp.sum(jnp.square(x[:, None] - x), axis=-1) / x.shape[1])
    # The number of neighbors is the number of clusters, so the bound of both is `max_clusters`.
    nearest = -jax.lax.top_k(jnp.where(is_token, -distance, -_FAR), max_clusters)[0]
    sum_of_squares = jnp.sum(jnp.square(jnp.where(is_cluster, nearest, 0)), axis=1)
    density = jnp.exp(-sum_of_squares / jnp.maximum(clusters, 1)) + noise * _uniform(m)
    is_denser = is_token & (density > density[:, None])
    max_distance = jnp.max(jnp.where(is_token & is_token[:, None], distance, 0))
    peak_distance = jnp.min(jnp.where(is_denser, distance, max_distance), axis=1)
    peak_score = jnp.where(is_token, density * peak_distance, -1)
    centre = jax.lax.top_k(peak_score, max_clusters)[1]
    distance_to_centre = jnp.where(is_cluster[:, None], distance[centre], _FAR)
    cluster = jnp.argmin(distance_to_centre, axis=0)
    # A center belongs to its own cluster even if another center has distance 0. Index m is out of
    # bounds and therefore dropped.
    cluster = cluster.at[jnp.where(is_cluster, centre, m)].set(
        jnp.arange(max_clusters), mode="drop"
    )
    membership = jax.nn.one_hot(cluster, max_clusters) * is_token[:, None]
    values = jnp.where(is_token[:, None], values, 0)
    total = jnp.einsum("mc,me->ce", membership, values, precision=_EXACT)
    return total / (membership.sum(0)[:, None] + 1e-6), centre


def _uniform(count: int) -> Float[Array, "count"]:
    """Returns random numbers in [0, 1), each of which depends only on its index."""
    key = jax.random.key(0, impl=THREEFRY)
    sample = jax.vmap(lambda index: jax.random.uniform(jax.random.fold_in(key, index)))
    return sample(jnp.arange(count))
