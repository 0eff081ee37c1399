"""What every pruner of `PRUNERS` has to keep; a new one is tested by being in the list."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from plain_decoder import loop_assemble, plain_logits
from quick import quick_or_slow
from small_world import glimpse, one_shot, stepprune
from views import view
from visual import noise

from stepprune_jax import PolicyConfig
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference import (
    Images,
    Prompts,
    RunOptions,
    Sampling,
    generate,
    greedy,
    pipeline,
    read_request,
    trace_arrays,
)
from stepprune_jax.inference.base import PrefillResult
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.inference.programs import run_select
from stepprune_jax.models import vlm
from stepprune_jax.pruning import Ranker
from stepprune_jax.registry import PRUNERS, build_pruner
from stepprune_jax.selectors import (
    AutoSelectConfig,
    GlimpsePrune,
    GlimpsePruneConfig,
    VisionSelector,
    VisionSelectorConfig,
)

N, K, STEPS = 16, 5, 4
# Options with which a budget counts what the last layer sees, as it does for all other methods.
OPTIONS = {
    name: {"average": False} for name in ("clse", "pyramiddrop", "sparsevlm", "sparsevlm_v2")
}
OPTIONS["topv"] = {"layer": 1}  # it needs a layer behind it
# Where a budget of so many leaves another number, as the authors count.
COUNTED = {"dart": {5: 4, 8: 4}}  # of a share of 7.5, less than one for each pivot
# What is kept stands in another order than that of the image, or has more added to it.
OWN_ORDER = ("holov", "prumerge", "prumerge_plus")
ADDED_TO = ("prumerge", "prumerge_plus")
# A small random policy for each kind of trained method.
POLICIES = {
    PolicyConfig: functools.partial(stepprune, max_steps=N),
    AutoSelectConfig: one_shot,
    VisionSelectorConfig: functools.partial(
        VisionSelector.init, jax.random.key(3), VisionSelectorConfig(32), None
    ),
    GlimpsePruneConfig: functools.partial(GlimpsePrune.init, jax.random.key(3), glimpse(), None),
}
# Methods of videos that keep images entirely have tests of their own.
NAMES = tuple(name for name, kind in PRUNERS.items() if not kind.keeps_images)
# One of each kind of place and of merging; others choose, merge or cut by the same means.
QUICK = ("stepprune", "fastv", "sparsevlm", "prumerge_plus", "glimpseprune")
COUNTING = tuple(name for name in NAMES if "count" in PRUNERS[name].budgets)
RANKERS = tuple(name for name in NAMES if issubclass(PRUNERS[name], Ranker))


def chosen_of(*arguments, **options):
    """What is kept, once its counts on the host have been held against those on the devices."""
    batch = plan_batch(*arguments, RunOptions(), **options)
    kept = pipeline.select(arguments[0], batch)
    if batch.pruner.budget.is_exact or "ranking" in options:
        np.testing.assert_array_equal(kept.count, batch.pairing.counts)
    return kept


def method(name, budget=K, policy=None, **options):
    kind = PRUNERS[name]
    if kind.config_type is not None and policy is None:
        policy = POLICIES[kind.config_type]()
    return build_pruner(
        name,
        budget if name in COUNTING else None,
        policy=policy,
        options=OPTIONS.get(name),
        **options,
    )


class Batch(NamedTuple):
    prompts: list[str]
    images: list[list[Image.Image]]


IMAGES = [noise(seed, (32, 32)) for seed in range(4)]
A, B, C, D = IMAGES
# Row 1 is the same in both; what else there is, and so the padding, is not.
BATCH = Batch(["What is this?", "is the red dog in a chat or no", "two"], [[A], [B, C], []])
OTHER = Batch(
    ["What is in this picture? " * 12, BATCH.prompts[1], "is a dog in a"], [[D], [B, C], [D]]
)


class Run(NamedTuple):
    """An answered batch; `begun` is a copy, as decoding consumes the state."""

    answers: list
    begun: PrefillResult

    def arrays(self, row):
        return trace_arrays(self.begun, row)


def answer(model, chosen):
    prefills = []
    answers = generate(
        model,
        *BATCH,
        chosen,
        sampling=Sampling(stop_ids=()),
        options=RunOptions(STEPS, "original"),
        trace=lambda batch: prefills.append(jax.tree.map(jnp.copy, batch)),
    )
    return Run(answers, prefills[0])


def begin(model, chosen, batch=BATCH, **padding):
    """Up to the first token, by the pipeline's stages."""
    request = read_request(model, *batch)
    images = pipeline.encode(model, request.images, chosen.taps(model.config))
    prompts, options = request.prompts(), RunOptions(STEPS, "original")
    inputs = model, chosen, prompts, images, options, greedy(())
    return pipeline.first_tokens(*inputs, **padding)


@pytest.fixture(scope="module")
def run(model):
    """Answers by name."""
    return functools.cache(lambda name: answer(model, method(name)))


@pytest.fixture(scope="module")
def tokens_of(model):
    """The projected tokens [n, e] of each image."""
    example = read_request(model, ["dog"] * 4, [[x] for x in IMAGES])
    features = pipeline.encode(model, example.images).features
    projected = np.asarray(jax.jit(model.backbone.project)(model.params, features))
    return {id(x): tokens for x, tokens in zip(IMAGES, projected, strict=True)}


def reference(model, name, result, row, tokens_of):
    """Logits [STEPS, v] after the prompt and each new token, by masking, without a cache.

    Nothing is dropped: the tokens that are have their own places and position ids, and are hidden
    from the layer on at which they were dropped. What is merged has no such equivalent.
    """
    request = read_request(model, *BATCH)
    table = np.asarray(model.params["language"]["embed"]["embedding"])
    arrays = result.arrays(row)
    images, cuts = BATCH.images[row], method(name).cuts(model.config, N)
    merges = any((arrays[f"kept_{stage}"] < 0).any() for stage in range(len(cuts) + 1))
    if merges or name in OWN_ORDER:
        pytest.skip("it merges or orders tokens; its own test has a reference")
    ids = (*request.ids[row], *result.answers[row].token_ids[: STEPS - 1])
    tokens, _ = loop_assemble(ids, [range(N)] * len(images), N, "original")
    hidden = [
        table[word] if image < 0 else tokens_of[id(images[image])][index]
        for word, image, index, _ in tokens
    ]
    position = [place for *_, place in tokens]
    slot_of = [None if image < 0 else (image, index) for _, image, index, _ in tokens]
    visible = []
    for stage in range(len(cuts) + 1):
        kept = set(
            zip(arrays[f"image_{stage}"].tolist(), arrays[f"kept_{stage}"].tolist(), strict=True)
        )
        visible.append(np.array([slot is None or slot in kept for slot in slot_of]))
        # The rows hold the kept tokens in their order, at the position ids they had.
        np.testing.assert_array_equal(
            arrays[f"position_{stage}"], np.array(position)[visible[-1]][: 1 - STEPS]
        )
    layers = range(model.config.text.num_layers)
    layer_visible = [visible[sum(cut.layer <= layer for cut in cuts)] for layer in layers]
    if any(cut.prunes_cache for cut in cuts):  # then the answer does not see it in earlier layers
        answer = np.arange(len(hidden))[:, None] > len(hidden) - STEPS
        layer_visible = [np.where(answer, visible[-1], layer_mask) for layer_mask in layer_visible]
    logits = plain_logits(
        model.params["language"], model.config.text, hidden, position, layer_visible
    )
    return logits[-STEPS:]


@pytest.mark.parametrize("name", quick_or_slow(NAMES, QUICK))
def test_a_full_budget_is_the_unpruned_model(model, run, name):
    full, unpruned = begin(model, method(name, N)), run("all").begun
    difference = np.abs(full.trace.logits - unpruned.trace.logits).max(1)
    if name in ("visionzip", "prumerge", "prumerge_plus", "holov"):
        assert "reproduces the unpruned model" in " ".join(PRUNERS[name].__doc__.split())
        assert (difference[:2] > 0.01).all() and difference[2] < 1e-5
        return
    np.testing.assert_allclose(difference, 0, atol=1e-5)
    np.testing.assert_array_equal(full.kept, [N, 2 * N, 0])


decode_step = jax.jit(vlm.decode_step, static_argnums=1)


@pytest.mark.parametrize("name", quick_or_slow(NAMES, ("glimpseprune", "stepprune")))
def test_dropping_and_caching_equal_masking_and_recomputing(model, run, tokens_of, name):
    result = run(name)
    cache, ids = result.begun.state.cache, np.array([a.token_ids for a in result.answers])
    stages = len(method(name).cuts(model.config, N)) + 1
    assert stages == 1 or len(cache) == stages
    expected = [reference(model, name, result, row, tokens_of) for row in range(3)]
    np.testing.assert_array_equal(ids, np.argmax(expected, axis=2))
    logits = result.begun.trace.logits
    for step in range(STEPS):
        np.testing.assert_allclose(logits, [row[step] for row in expected], atol=1e-4)
        token = jnp.asarray(ids[:, step], jnp.int32)
        logits, cache = decode_step(model.params, model.config, token, cache)


@pytest.mark.parametrize("name", quick_or_slow(NAMES, QUICK))
def test_neither_other_rows_nor_larger_buckets_change_a_row(model, run, name):
    """By the pipeline's stages, one by one; row 1 is the same in both batches."""
    small_batch, chosen = run(name).begun, method(name)
    large_batch = begin(model, chosen, OTHER, sizes=(K + 2, N), width=100)
    enters = chosen.schedule(model.config, N).enter
    slots = [[stage.index.shape[1] for stage in b.trace.stages] for b in (large_batch, small_batch)]
    assert slots[0][0] == 100 + 2 * (N if enters == N else K + 2)
    assert slots[0] > slots[1]
    assert large_batch.kept[1] == small_batch.kept[1]
    large_arrays, small_arrays = trace_arrays(large_batch, 1), trace_arrays(small_batch, 1)
    assert large_arrays.keys() == small_arrays.keys()
    for part in large_arrays:
        np.testing.assert_allclose(large_arrays[part], small_arrays[part], atol=1e-5, err_msg=part)


@pytest.mark.parametrize("name", quick_or_slow(COUNTING, QUICK))
@pytest.mark.parametrize(("budget", "count"), [(K, K), ("15/32", 8)])
def test_as_many_tokens_are_kept_as_the_budget_says(model, run, name, budget, count):
    result = run(name) if budget == K else answer(model, method(name, budget))
    count = COUNTED.get(name, {}).get(count, count)
    assert [a.kept for a in result.answers] == [count, 2 * count, 0]
    assert [a.visual_tokens for a in result.answers] == [N, 2 * N, 0]
    last = len(result.begun.trace.stages) - 1
    np.testing.assert_array_equal(result.arrays(0)[f"image_{last}"], [0] * count)
    np.testing.assert_array_equal(result.arrays(1)[f"image_{last}"], [0] * count + [1] * count)
    # Most other tests here could not fail if pruning did not change what the model says.
    pruned, unpruned = (run(x).begun.trace.logits for x in (name, "all"))
    assert (np.abs(pruned - unpruned).max(1)[:2] > 0.1).all()


def check(name, kept, inputs, count):
    """The invariants of `Kept`."""
    index, place, tokens, valid = (np.asarray(x) for x in kept[:4])
    n, sizes = inputs.tokens.shape[1], _sizes(inputs)
    np.testing.assert_array_equal(kept.count, count)
    np.testing.assert_array_equal(valid.sum(1), count)
    assert (np.diff(valid.astype(int), axis=1) <= 0).all()  # a prefix
    assert (
        (index[~valid] == -1).all() and (place[~valid] == 0).all() and (tokens[~valid] == 0).all()
    )
    assert ((place >= 0) & (place < n)).all()
    for row in range(len(index)):
        kept_index = index[row][index[row] >= 0]
        assert len(np.unique(kept_index)) == len(kept_index) and (kept_index < sizes[row]).all()
        assert name in OWN_ORDER or (np.diff(kept_index) > 0).all()
        np.testing.assert_array_equal(place[row][index[row] >= 0], kept_index)
        if name not in ADDED_TO:
            check_tokens(name, tokens[row][index[row] >= 0], inputs.tokens[row][kept_index])


def check_tokens(name, actual, expected):
    """Holds tokens against others: bit for bit, unless two programs have projected them."""
    tolerance = 1e-6 if PRUNERS[name].after_projector else 0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def _sizes(inputs):
    return np.asarray(inputs.valid.sum(1))


def made_view(pruner, config, grids):
    """Random tokens of images with so many rows and columns, and junk behind the smaller ones."""
    random = np.random.default_rng(0)
    sizes = np.prod(grids, axis=1)
    r, n = len(grids), int(sizes.max())
    tokens = random.standard_normal((r, n, 32), np.float32)
    valid = np.arange(n) < sizes[:, None]
    tokens = np.where(valid[..., None], tokens, 100)
    count = [pruner.schedule(config, int(size)).enter for size in sizes]
    count = [size if c is None else c for c, size in zip(count, sizes, strict=True)]
    tap_values = {
        "attention": random.random((r, 4, n + 1), np.float32),
        "received": random.random((r, n), np.float32) / n,
        "keys": random.standard_normal((r, 4, n + 1, 8), np.float32),
        "query": random.standard_normal((r, 4, 8), np.float32),
        "hidden": np.concatenate([np.ones((r, 1, 32), np.float32), tokens], axis=1),
    }
    taps = [tap_values[tap.kind] for tap in pruner.taps(config)]
    words, seed = np.arange(4) < 1 + np.arange(r)[:, None] % 4, np.uint32(7 + np.arange(r))
    mask = {} if valid.all() else {"valid": valid}
    text = {"text": random.standard_normal((r, 4, 48), np.float32), "text_valid": words}
    return view(tokens, *taps, count=count, grid=np.int32(grids), seed=seed, **text, **mask)


def batch_of(model, pruner, inputs):
    """Prompts and images behind the tower, of which a pruner is shown such a view but for text."""
    r, sizes = len(inputs.tokens), _sizes(inputs).astype(np.int32)
    seed, one_token = np.asarray(inputs.seed), np.ones(r, np.int32)
    words = (37 * seed[:, None].astype(np.int32) + np.array([3, 14, 25, 36], np.int32)) % 100
    num_words = np.asarray(inputs.text_valid.sum(1, dtype=jnp.int32))
    image_of = np.arange(r, dtype=np.int32)[:, None]
    ids = np.full((r, 1), IMAGE_TOKEN, np.int32)
    taps = dict(zip(pruner.taps(model.config), map(np.asarray, inputs.taps), strict=True))
    tokens = np.asarray(inputs.tokens)
    images = Images(np.asarray(inputs.grid), sizes, seed, features=tokens, taps=taps)
    return Prompts(ids, one_token, words, num_words, image_of, image_of[:, 0]), images


@functools.partial(jax.jit, static_argnums=1)
def project(params, backbone, pruner, tokens):
    """Projects tokens for a pruner that reads and returns projected ones."""
    return backbone.project(params, tokens) if pruner.after_projector else tokens


def alone(inputs, row):
    """One row without the padding."""
    size = int(_sizes(inputs)[row])
    of_row = jax.tree.map(lambda x: x[row : row + 1], inputs)
    return of_row._replace(tokens=of_row.tokens[:, :size], mask=None)


STOPS = [("stepprune", "adaptive", 2.0), ("stepprune", "adaptive", -1000.0)]


@pytest.mark.parametrize(
    ("name", "budget", "bias"), [*((name, "1/3", None) for name in COUNTING), *STOPS]
)
def test_images_share_a_batch_and_what_is_kept_has_its_invariants(model, name, budget, bias):
    """They differ in size, unless the method needs a tower, whose images are all of one size."""
    policy = stepprune() if name == "stepprune" else None  # T_max is half an image
    pruner = method(name, budget, policy=policy, stop_bias=bias)
    pruner.check(model.config, N)
    grids = [(4, 4)] * 3 if pruner.taps(model.config) else [(4, 4), (2, 3), (3, 2)]
    inputs = made_view(pruner, model.config, grids)
    sizes = _sizes(inputs)
    batch = batch_of(model, pruner, inputs)
    kept = chosen_of(model, pruner, *batch)
    count = np.array(kept.count) if budget == "adaptive" else np.array(inputs.count)
    tokens = project(model.params, model.backbone, pruner, inputs.tokens)
    check(name, kept, inputs._replace(tokens=tokens), count)
    max_counts = [pruner.schedule(model.config, int(size)).most for size in sizes]
    assert (count <= max_counts).all()
    if budget == "adaptive":  # it stops early, or never but at T_max of each image
        assert (count < max_counts).any() == (bias > 0)
    for row, size in list(enumerate(sizes))[1:]:
        single = chosen_of(model, pruner, *batch_of(model, pruner, alone(inputs, row)))
        np.testing.assert_array_equal(single.count[0], count[row])
        batched_index = np.asarray(kept.index[row, : count[row]])
        np.testing.assert_array_equal(
            single.index[0, : count[row]], batched_index, err_msg=str(size)
        )


@pytest.mark.parametrize("name", RANKERS)
def test_all_budgets_share_few_programs(model, name):
    n, before = 24, run_select.num_compiled()
    policy = stepprune(max_steps=n) if PRUNERS[name].config_type is PolicyConfig else None
    for budget in range(1, 21):
        chosen = method(name, budget, policy=policy)
        inputs = made_view(chosen, model.config, [(4, 6)] * 2)
        kept = chosen_of(model, chosen, *batch_of(model, chosen, inputs))
        np.testing.assert_array_equal(kept.count, [budget, budget])
    assert run_select.num_compiled() - before <= 2  # the buckets 16 and 24


@pytest.mark.parametrize("name", RANKERS)
def test_a_ranking_serves_every_budget(model, name):
    kind = PRUNERS[name]
    chosen = method(name)
    batch = batch_of(model, chosen, made_view(chosen, model.config, [(4, 4)] * 3))
    steps = chosen.schedule(model.config, N).most
    ranking = jax.device_get(pipeline.rank(model, chosen, *batch, steps))
    np.testing.assert_array_equal(np.sort(ranking.order, axis=1), [np.arange(N)] * 3)
    budgets = [(1, None), (K, None), (N, None)]
    if "adaptive" in kind.budgets:  # two rows of three stop by themselves, then one
        peaks = np.sort(ranking.margin[:, 1:].max(1))
        biases = -(peaks[1:] + peaks[:-1]) / 2
        budgets += [("adaptive", float(bias)) for bias in biases]
    counts = set()
    for budget, bias in budgets:
        chosen = method(name, budget, stop_bias=bias)
        ranked = chosen_of(model, chosen, *batch, ranking=ranking, sizes=(N,))
        selected = chosen_of(model, chosen, *batch, sizes=(N,))
        # Tokens that are taken by a ranking are still to be projected.
        tokens = project(model.params, model.backbone, chosen, ranked.tokens)
        tokens = np.where(ranked.valid[..., None], tokens, 0)
        check_tokens(name, tokens, selected.tokens)
        ranked = ranked._replace(tokens=selected.tokens)
        jax.tree.map(np.testing.assert_array_equal, ranked, selected)
        counts.add(tuple(ranked.count.tolist()))
        assert budget == "adaptive" or counts >= {(budget,) * 3}
    assert any(len(set(count)) > 1 for count in counts) == ("adaptive" in kind.budgets)
