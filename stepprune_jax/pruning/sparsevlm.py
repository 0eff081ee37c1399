"""SparseVLM: the question's words that are relevant to the image rate its tokens, in stages.

Zhang et al. (https://arxiv.org/abs/2410.04417). Text tokens whose embeddings are most similar to
the image's are *raters*. After some layers, visual tokens are ranked by the attention of the raters
in those layers, and the best remain. `SparseVLM` (version 1.5) recycles the best of the others: it
clusters them and keeps the mean of each cluster. `SparseVLMv2` (version 2.0, also known as
SparseVLM+) recycles none; it divides the attention by that of rotary positions alone, and uses the
heads that attend to the image most.
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
    """Base of both versions: raters, and lists of token counts.

    Attributes:
        pruning_loc: layers after which tokens are pruned; None for the authors' 2, 6 and 15, or, in
            a model with fewer than 17 layers, those at the same share of its depth.
        sparse_token_list: tokens to keep after each of them, in addition to recycled ones; all but
            one if there are no more. None for the authors' lists where the budget is 1/3, 2/9, 1/6
            or 1/9 of an image's tokens at their layers, and otherwise for counts that fall by a
            constant ratio to meet the budget. If given, it takes precedence and a budget is only a
            label.
        average: whether the budget is the mean over layers of the tokens a layer passes on, as the
            authors count, or the number of tokens after the last of `pruning_loc`.
    """

    pruning_loc: tuple[int, ...] | None = None
    sparse_token_list: tuple[int, ...] | None = None
    average: bool = True

    schedules: ClassVar[tuple[str, ...]] = ("sparse_token_list",)
    # The authors' lists for 576 tokens, by the budget's share of them.
    lists: ClassVar[dict[Fraction, tuple[int, ...]]]
    # Intermediates of the layer before a cut, in addition to its attention.
    extra_taps: ClassVar[tuple[str, ...]] = ()

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects layers that do not exist, ill-formed lists, and unreachable budgets."""
        super().check(config, num_tokens)
        depth, layers = config.text.num_layers, self._layers(config)
        known = are_layers(layers, 0, depth - 2)
        self.expect("pruning_loc", known, f"ascending layers from 0 to {depth - 2}")
        values = self.sparse_token_list
        known = values is None or (len(values) == len(layers) and min(values) >= 1)
        self.expect("sparse_token_list", known, f"{len(layers)} integers from 1")
        if self._list(config, num_tokens) is not None:
            return
        counts = [num_tokens, *map(sum, self.schedule(config, num_tokens).after)]
        budget = self.budget.exact_count(num_tokens)
        total = sum(w * n for w, n in zip(stage_widths(layers, depth), counts, strict=True))
        met = total <= budget * depth if self.average else counts[-1] == budget
        what = "mean over layers" if self.average else "number"
        self.expect("budget", met, f"a larger {what}: it prunes after {layers} of {depth} layers")

    def program(self) -> "TextRated":
        """Removes the schedule, as `drop` is given the counts."""
        return dataclasses.replace(
            self, budget=Budget(), pruning_loc=None, sparse_token_list=None, average=True
        )

    def cuts(self, config: ModelConfig, num_tokens: int) -> tuple[LayerCut, ...]:
        """Returns a cut after each listed layer; the first one also reads embeddings."""
        cuts = []
        for layer in self._layers(config):
            taps = [Tap("attention", layer), *(Tap(kind, layer) for kind in self.extra_taps)]
            embeddings = [] if cuts else [Tap("hidden", 0)]
            cuts.append(LayerCut(layer + 1, (*taps, *embeddings), "text"))
        return tuple(cuts)

    def schedule(self, config: ModelConfig, num_tokens: int) -> Schedule:
        """Counts the kept and the recycled tokens after each listed layer."""
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
                kept = max(0, min(values[number], before - 1))
            left.append(Survivors(kept, self._merged(before - kept)))
            before = sum(left[-1])
        return Schedule(num_tokens, num_tokens, tuple(left))

    def drop(
        self,
        cut: LayerCut,
        sequence: Sequence,
        taps: dict[str, Array],
        count: Int[Array, "b j"],
    ) -> tuple[Sequence, Bool[Array, "b s"]]:
        """Keeps the tokens that the raters attend to most; the first cut records the raters."""
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
        """Returns the rows, and which slots remain: the best."""
        return sequence, keep_best(score, sequence.image, count)

    def _merged(self, dropped: int) -> int:
        """Returns the number of tokens that `dropped` ones are recycled into."""
        return 0

    def _layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Returns the layers after which tokens are pruned."""
        if self.pruning_loc is not None:
            return self.pruning_loc
        behind = choose_layers(tuple(layer + 1 for layer in LAYERS), config.text.num_layers)
        return tuple(layer - 1 for layer in behind)

    def _list(self, config: ModelConfig, num_tokens: int) -> tuple[int, ...] | None:
        """Returns the tokens to keep at each cut; None if they follow from the budget."""
        if self.sparse_token_list is not None:
            return self.sparse_token_list
        values = self.lists.get(Fraction(self.budget.exact_count(num_tokens), num_tokens))
        if values is None or not self.average or self._layers(config) != LAYERS:
            return None
        return tuple(max(1, value * num_tokens // 576) for value in values)


@dataclasses.dataclass(frozen=True)
class SparseVLM(TextRated):
    """Keeps the tokens that raters attend to, and the means of clusters of the best others.

    Attributes:
        noise: upper bound of the random numbers added to densities, which break ties between
            cluster centres; the same draw for every image. With 0, ties remain: two tokens that are
            each other's neighbours may both be centres.
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
        """Returns the rows, and which slots remain: the best, and clusters of the others."""
        return recycle(sequence, score, count, self.noise)


@dataclasses.dataclass(frozen=True)
class SparseVLMv2(TextRated):
    """Keeps the tokens that raters attend to in some heads, corrected for position.

    Attributes:
        heads: number of heads that vote: those with the largest sum of attention from raters to
            visual tokens; all heads of a model with fewer.
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
        """Averages the raters' attention over that of rotary positions alone, over `heads`."""
        attention = without_positions(taps["attention"], taps["rotary"], sequence)
        of_head = jax.vmap(rater_mean, (1, None), 1)(attention, sequence)
        weight = jnp.sum(of_head, axis=2, where=(sequence.image >= 0)[:, None])
        rank = jnp.argsort(jnp.argsort(-weight, axis=1, stable=True), axis=1)
        heads = min(self.heads, of_head.shape[1])
        return jnp.mean(of_head, axis=1, where=(rank < heads)[..., None])


def rate_text(
    embeddings: Float[Array, "b s e"], sequence: Sequence, count: int
) -> Float[Array, "b s"]:
    """Marks the raters with 1: text that is more relevant to the image than the text's average.

    With V the embeddings of visual tokens and T those of the text after the last of them, among the
    last `count` slots, these exceed the mean over text of softmax(V T^T), averaged over visual
    tokens; the softmax is over text. Rows without images have none.
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
    """Returns the mean under a mask; 0 if the mask is empty."""
    where = jnp.broadcast_to(where, x.shape)
    return jnp.sum(x, axis=axis, where=where) / jnp.maximum(1, where.sum(axis))


def rater_mean(attention: Float[Array, "b t s"], sequence: Sequence) -> Float[Array, "b s"]:
    """Averages the attention of a row's last t tokens over its raters; 0 without raters."""
    assert sequence.note is not None  # from the first cut on
    rater = jnp.take_along_axis(sequence.note, last_slots(sequence, attention.shape[1]), axis=1)
    # Raters are text after an image, so slot 0, which may be repeated, is not among them.
    total = jnp.einsum("bt,bts->bs", rater, attention, precision=_EXACT)
    return total / jnp.maximum(1, rater.sum(1, keepdims=True))


def without_positions(
    attention: Float[Array, "b h t s"], angles: Float[Array, "2 b s c"], sequence: Sequence
) -> Float[Array, "b h t s"]:
    """Divides attention by the scores that queries and keys of all ones would have.

    These scores are products of rotated ones over sqrt(c), without a softmax: they may be negative.
    Where one is exactly 0, so is the result.
    """
    _, b, s, c = angles.shape
    (ones,) = jnp.swapaxes(rotate(jnp.ones((b, 1, s, c)), *angles), 0, 1)
    queries = last_slots(sequence, attention.shape[2])[..., None]
    score = jnp.einsum(
        "btc,bsc->bts", jnp.take_along_axis(ones, queries, axis=1), ones, precision=_EXACT
    )
    score = (score * c**-0.5)[:, None]
    return jnp.where(score == 0, 0, attention / jnp.where(score == 0, 1, score))


def num_clusters(dropped: Count) -> tuple[Count, Count]:
    """Returns how many of the dropped tokens are recycled, and into how many clusters.

    Three tenths of them, and a tenth of those; each rounded down, plus one. 0 if none are dropped.
    """
    candidates = (3 * dropped // 10 + 1) * (dropped > 0)
    return candidates, (candidates // 10 + 1) * (dropped > 0)


def recycle(
    sequence: Sequence, score: Float[Array, "b s"], count: Int[Array, "b j"], noise: float
) -> tuple[Sequence, Bool[Array, "b s"]]:
    """Keeps the best tokens of each image, followed by clusters of the best of the others.

    Clusters take the position ids of their centres. Returns the rows, and which slots remain.
    """
    (b, s), j = score.shape, count.shape[1]
    assert sequence.note is not None  # from the first cut on
    keep = keep_best(score, sequence.image, count)
    most_candidates, most = num_clusters(s)

    hidden, deep, whole = sequence.hidden, sequence.deep, None
    if deep is not None:
        whole = jnp.concatenate([hidden, deep.reshape(b, s, -1)], axis=2)

    def of_image(hidden, whole, score, dropped):
        candidates, clusters = num_clusters(dropped.sum())
        order = jnp.argsort(jnp.where(dropped, -score, _FAR), stable=True)[:most_candidates]
        merged = None if whole is None else whole[order]
        tokens, centre = cluster_and_merge(hidden[order], candidates, clusters, most, noise, merged)
        return tokens, order[centre], jnp.arange(most) < clusters

    is_of = sequence.image[:, None] == jnp.arange(j)[:, None]
    of_row = jax.vmap(of_image, (None, None, None, 0))
    tokens, centre, real = jax.vmap(of_row)(hidden, whole, score, is_of & ~keep[:, None])
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
    if deep is not None:
        merged = tokens[..., hidden.shape[2] :]
        deep = put(deep, merged.reshape(b, j * most, *deep.shape[2:]))
    left = sequence._replace(
        hidden=put(hidden, tokens[..., : hidden.shape[2]]),
        deep=deep,
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
    whole: Float[Array, "m w"] | None = None,
) -> tuple[Float[Array, "most w"], Int[Array, "most"]]:
    """Clusters tokens by density peaks and nearest neighbours (DPC-KNN), and averages clusters.

    Tokens are compared by `x`, and averaged as a `whole` if that is given.

    A token's density is exp(-mean squared distance to its `clusters` nearest tokens, including
    itself), plus noise; its distance is that to the nearest denser token, or the largest of all if
    there is none. The tokens with the largest products of both are centres; every other token joins
    the nearest centre. Distances are Euclidean, divided by sqrt(e). Ties go to the first.

    Only the first `count` tokens are real, and only the first `clusters` results are defined: the
    sum over each cluster divided by its size plus 1e-6, and the centre's index.
    """
    x, m = x.astype(jnp.float32), x.shape[0]
    whole = x if whole is None else whole.astype(jnp.float32)
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
    total = jnp.einsum("mc,me->ce", member, jnp.where(real[:, None], whole, 0), precision=_EXACT)
    return total / (member.sum(0)[:, None] + 1e-6), centre


def _uniform(count: int) -> Float[Array, "count"]:
    """Returns random numbers in [0, 1), each depending only on its place."""
    key = jax.random.key(0, impl=THREEFRY)
    draw = jax.vmap(lambda place: jax.random.uniform(jax.random.fold_in(key, place)))
    return draw(jnp.arange(count))
