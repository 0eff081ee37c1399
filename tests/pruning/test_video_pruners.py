"""Methods that prune videos equal programs that were written from their rules in numpy."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from views import view

from stepprune_jax.pruning import Evs, Frames, Grid, Random, VCast, VidCom2
from stepprune_jax.pruning.temporal import MAX_PATCHES

# (temporal patches, rows, columns) of videos, and the shares that are kept.
VIDEOS = ((1, 3, 4), (2, 4, 4), (3, 2, 5), (4, 3, 3), (5, 4, 2), (6, 2, 2), (8, 3, 2), (12, 1, 3))
SHARES = ("1/4", "1/2", "3/4")
WIDTH = 24


def make_videos(seed=0):
    """Returns the tokens [T, h w, d] of each video, with frames that resemble each other."""
    random = np.random.default_rng(seed)
    videos = []
    for patches, rows, columns in VIDEOS:
        size = rows * columns
        still = random.standard_normal((1, size, WIDTH))
        change = random.standard_normal((patches, size, WIDTH)) * random.random((patches, 1, 1))
        videos.append((2 + still + change).astype(np.float32))
    return videos


def select(pruner, videos=None, shapes=VIDEOS):
    """Returns the indices that a method keeps of each video; all videos are one padded batch."""
    videos = make_videos() if videos is None else videos
    sizes = np.array([len(video) * video.shape[1] for video in videos], np.int32)
    frames = np.array([len(video) for video in videos], np.int32)
    n = int(sizes.max()) + 3
    tokens = np.full((len(videos), n, WIDTH), 50.0, np.float32)
    for row, video in zip(tokens, videos, strict=True):
        row[: video.shape[0] * video.shape[1]] = video.reshape(-1, WIDTH)
    counts = np.array([pruner.budget.exact_count(int(size)) for size in sizes], np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = pruner.media_counts(counts, sizes, frames)
    grid = np.array([(patches * rows, columns) for patches, rows, columns in shapes], np.int32)
    inputs = view(
        tokens, count=counts, valid=np.arange(n) < sizes[:, None], grid=grid, frames=frames
    )
    inputs = inputs._replace(seed=jnp.arange(len(videos), dtype=jnp.uint32))
    kept = jax.jit(lambda inputs: pruner.program().keep(inputs, n))(inputs)
    np.testing.assert_array_equal(kept.count, counts)
    return [np.asarray(index[index >= 0]) for index in kept.index]


def cosine(a, b):
    return np.sum(a * b, -1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def evs_by_rule(video, share):
    patches, size, _ = video.shape
    dissimilarity = np.full((patches, size), 255.0)
    dissimilarity[1:] = 1 - cosine(video[1:], video[:-1])
    order = np.argsort(-dissimilarity.ravel(), kind="stable")
    return np.sort(order[: max(size, int(patches * size * share))])


def vidcom2_by_rule(video, share, exact=True):
    patches, size, width = video.shape
    x = video.astype(np.float64).reshape(-1, width)
    x = x[:, np.sort(np.argsort(x.var(0), kind="stable")[: width // 2])]
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).reshape(patches, size, -1)

    def similarity(center):
        distance = ((x - center) ** 2).sum(-1)
        return sum(np.exp(-distance / (2 * alpha)) for alpha in (1 / 8, 1 / 4, 1 / 2, 1, 2))

    v, f = similarity(x.mean((0, 1))), similarity(x.mean(1, keepdims=True))
    count = max(patches, min(int(patches * size * share), patches * size))
    rate = count / (patches * size) if exact else share
    s = -v.mean(1)
    p = np.exp((s - s.max()) / 0.01)
    p /= p.sum()
    quotas = np.clip(np.round(np.minimum(1, rate * (1 + p - p.mean())) * size), 1, size)
    kept = set()
    for patch in range(patches):
        order = np.argsort(v[patch] + f[patch], kind="stable")
        kept |= {patch * size + token for token in order[: int(quotas[patch])]}
    if not exact:
        return np.sort(list(kept))
    by_score = np.argsort((v + f).ravel(), kind="stable").tolist()
    kept_order = [token for token in by_score if token in kept]
    other_order = [token for token in by_score if token not in kept]
    return np.sort((kept_order + other_order)[:count])


def vcast_by_rule(video, share):
    patches, size, _ = video.shape
    count = round(patches * size * share)
    x = video.astype(np.float64)
    center = x.mean(1)
    center /= np.linalg.norm(center, axis=1, keepdims=True)
    curve = np.ones(patches)
    for t in range(1, patches - 1):
        curve[t] = 1 - cosine(center[t] - center[t - 1], center[t + 1] - center[t])
    weights = np.exp(curve / 0.7)
    weights /= weights.sum()
    count = max(count, patches)
    raw = weights * (count - patches)
    quotas = 1 + np.minimum(np.floor(raw), size - 1).astype(int)
    remainder = raw - np.floor(raw)
    while quotas.sum() < count:  # the largest remainder first, until its patch is full
        patch = np.argmax(np.where(quotas < size, remainder, -1))
        quotas[patch] += 1
    kept = []
    for t in range(patches):
        length = np.linalg.norm(x[t], axis=1)
        relative = (length - length.min()) / (length.max() - length.min() + 1e-6)
        order = np.argsort(-(1 - cosine(x[t], center[t]) + relative), kind="stable")
        kept += (t * size + order[: quotas[t]]).tolist()
    return np.sort(kept)


def frames_by_rule(video, count):
    patches, size, _ = video.shape
    num_kept = max(1, int(count / size + 0.5))
    times = [int((i + 0.5) * patches / num_kept) for i in range(num_kept)]
    return np.concatenate([t * size + np.arange(size) for t in times])


def fraction(share):
    numerator, denominator = map(int, share.split("/"))
    return numerator / denominator


RULES = {
    "evs": (Evs, lambda video, share, count: evs_by_rule(video, share)),
    "vidcom2": (VidCom2, lambda video, share, count: vidcom2_by_rule(video, share)),
    "vcast": (VCast, lambda video, share, count: vcast_by_rule(video, share)),
    "frames": (Frames, lambda video, share, count: frames_by_rule(video, count)),
}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", RULES)
def test_kept_tokens_equal_the_rule(name, share):
    kind, rule = RULES[name]
    pruner = kind(share)
    for video, index in zip(make_videos(), select(pruner), strict=True):
        count = pruner.budget.exact_count(video.shape[0] * video.shape[1])
        expected = rule(video, fraction(share), count)
        np.testing.assert_array_equal(index, expected, err_msg=str(video.shape))


def test_the_grid_shares_tokens_evenly_over_time_rows_and_columns():
    for share in SHARES:
        for (patches, rows, columns), index in zip(VIDEOS, select(Grid(share)), strict=True):
            per_patch = np.bincount(index // (rows * columns), minlength=patches)
            assert per_patch.max() - per_patch.min() <= 1
            assert len(np.unique(index)) == len(index)
    # Two tokens in each of two patches: one in each half of the rows or columns.
    (index,) = select(Grid("1/4"), make_videos()[1:2], VIDEOS[1:2])
    assert np.bincount(index // 16).tolist() == [4, 4]
    cells = index[:4] // 8, index[:4] % 4 // 2
    assert len({*zip(*cells, strict=True)}) == 4


def test_random_tokens_come_from_all_of_a_video():
    (index,) = select(Random(30), make_videos()[6:7], VIDEOS[6:7])
    assert len(index) == 30 and len(np.unique(index // 6)) == 8


@pytest.mark.parametrize("kind", [Evs, Frames])
def test_a_rate_that_leaves_one_temporal_patch_warns(kind):
    sizes, frames = np.array([64], np.int32), np.array([4], np.int32)
    pruner = kind("1/8")
    with pytest.warns(UserWarning, match=f"^{pruner.name} keeps .* of 64 .* one of 4 temporal"):
        pruner.media_counts(np.array([8], np.int32), sizes, frames)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.with_budget("1/2").media_counts(np.array([32], np.int32), sizes, frames)


@pytest.mark.parametrize("kind", [Evs, Frames])
def test_images_are_kept_entirely(kind):
    counts = kind(5).media_counts(np.array([5]), np.array([12]), np.array([1]))
    assert counts.tolist() == [12]


def test_deepstack_features_take_part_in_vidcom2_only_on_request():
    video, random = make_videos()[3], np.random.default_rng(1)
    size = video.shape[0] * video.shape[1]
    deep = 40 * random.standard_normal((1, size, WIDTH)).astype(np.float32)
    inputs = view(video.reshape(1, size, WIDTH), count=12, frames=[4], deep=deep)
    index = {
        flag: np.asarray(VidCom2(12, deepstack=flag).keep(inputs, 12).index[0])
        for flag in (False, True)
    }
    np.testing.assert_array_equal(index[False], vidcom2_by_rule(video, 12 / size))
    joined = np.concatenate([video, deep.reshape(video.shape)], axis=2)
    np.testing.assert_array_equal(index[True], vidcom2_by_rule(joined, 12 / size))


def test_the_longest_sampled_video_has_a_slot_for_each_temporal_patch():
    assert MAX_PATCHES == 768 // 2
