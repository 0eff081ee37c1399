"""Shapes that a stream of requests reaches: few, listed in advance, compiled in advance."""

import itertools

import jax
import numpy as np
import pytest
from generation_reference import ByQuestion
from tiny_qwen import qwen_tokenizer, tiny_qwen3_config, tiny_qwen_config
from visual import noise

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference import Generator, Request, RunOptions, pipeline
from stepprune_jax.inference.base import read_images
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.models import vlm
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL
from stepprune_jax.models.qwen2_5_vl.images import QwenImageSettings
from stepprune_jax.models.qwen3_vl import Qwen3_VL
from stepprune_jax.policy.buckets import (
    fraction_ladder,
    ladder,
    pad_ids,
    pad_rows,
    power_of_two,
    prompt_width,
    round_up,
    row_bucket,
)
from stepprune_jax.pruning import AllTokens
from stepprune_jax.registry import build_pruner

SIDE = 8  # pixels of a token's side


def qwen(max_tokens, kind=Qwen3_VL, config=tiny_qwen3_config):
    """A Qwen for images of 4 to `max_tokens` tokens, and its settings, without weights."""
    backbone = kind.read(config(qwen_tokenizer()), None)
    bounds = {"min_pixels": 4 * SIDE**2, "max_pixels": max_tokens * SIDE**2}
    return backbone.replace(**bounds), QwenImageSettings()


def one_layer(tokenizer):
    """Describes a Qwen2.5-VL that compiles in little time."""
    raw = tiny_qwen_config(tokenizer, num_hidden_layers=1)
    raw["vision_config"] |= {"depth": 1, "fullatt_block_indexes": [0]}
    return raw


PRUNERS = {
    "all": AllTokens(),
    "random": build_pruner("random", "2/9"),
    "fastv": build_pruner("fastv", "1/3", options={"layer": 1}),
    "sparsevlm": build_pruner("sparsevlm", "1/2"),
    "cdpruner": build_pruner("cdpruner", 4),
}


def make_request(backbone, settings, size, text, words):
    """A request about an image of a size, (height, width) in pixels."""
    pixels = backbone.preprocess(settings, [noise(0, size)])
    ids = (IMAGE_TOKEN, *[5] * text)
    return Request((ids,), (ids[1 : words + 1],), read_images(backbone, [pixels]), ((0,),))


def shapes(model, pruner, request):
    """Returns the plan and the shapes that decide the program of a request."""
    batch = plan_batch(model, pruner, request.prompts(), request.images, RunOptions(1))
    inputs = pipeline.prepare_prefill(model, batch)
    leaves, tree = jax.tree.flatten((inputs.tokens, inputs.layout))
    return inputs.plan, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def test_the_padded_sizes_of_image_and_text_decide_all_shapes():
    """Those of 65 to 128 text tokens and 161 to 320 visual tokens, here."""
    backbone, settings = qwen(1000)
    model = VLM(vlm.abstract_params(backbone), backbone)
    sizes, texts = ((7 * SIDE, 23 * SIDE), (16 * SIDE, 20 * SIDE), (99, 150)), (65, 90, 128)
    for pruner in PRUNERS.values():
        pairs = itertools.product(sizes, texts)
        requests = (make_request(backbone, settings, *pair, 30) for pair in pairs)
        assert len({shapes(model, pruner, request) for request in requests}) == 1


@pytest.mark.parametrize("pruner", [AllTokens(), build_pruner("grid", 64)], ids=str)
def test_at_most_fourteen_programs_serve_images_of_all_sizes(pruner):
    """By the published bounds, of 64 to 16,384 tokens."""
    backbone = qwen(16_384)[0].replace(min_pixels=64 * SIDE**2)
    model, reached = VLM(vlm.abstract_params(backbone), backbone), set()
    for pixels in backbone.list_example_pixels(*[128 * SIDE] * 2):
        images = read_images(backbone, [pixels])
        request = Request(((IMAGE_TOKEN, *[5] * 50),), ((5,) * 30,), images, ((0,),))
        reached.add(shapes(model, pruner, request))
    assert len(reached) <= 14


def test_images_of_one_padded_size_share_the_programs_of_a_learned_stop():
    """The pruner decides how many tokens it keeps."""
    backbone, settings = qwen(40, Qwen2_5_VL, one_layer)
    init_params = jax.jit(vlm.init_params, static_argnums=1)
    model = VLM(init_params(jax.random.key(0), backbone), backbone)
    generator = Generator(model, ByQuestion(), options=RunOptions(1))
    sizes = ((64, 40), (50, 63), (40, 64), (64, 44))
    counts = []
    for size, text in zip(sizes, (70, 75, 66, 72), strict=True):
        generator.begin(make_request(backbone, settings, size, text, text - 15))
        counts.append(num_compiled())
    # The first two have rows of two lengths; the others have rows of one of them.
    assert counts[0] < counts[1] == counts[2] == counts[3]


def test_buckets_hold_their_sizes_with_little_padding():
    sizes = ladder(2048)
    assert sizes[:5] == (64, 80, 96, 112, 128) and sizes[-1] == 2048 and 640 in sizes
    assert all(larger <= 1.25 * size for size, larger in itertools.pairwise(sizes))
    assert ladder(50) == (50,) and ladder(100) == (64, 80, 96, 100)
    assert [row_bucket(n) for n in (0, 1, 2, 3, 4, 5, 7, 9)] == [0, 1, 2, 3, 4, 6, 8, 12]
    assert row_bucket(5, (5, 10)) == 5 and row_bucket(7, (10,)) == 8


def test_sizes_are_rounded_up_by_one_rule_each():
    assert [power_of_two(count) for count in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]
    assert round_up(np.array([0, 1, 8, 9]), 8).tolist() == [0, 8, 8, 16]
    assert fraction_ladder(576) == (72, 144, 288, 576) and fraction_ladder(3) == (1, 2, 3)
    assert pad_rows(5, 2).tolist() == [0, 1, 2, 3, 4, 0]
    assert pad_rows(10, 5).tolist() == [*range(10)]
    ids = np.array([[1, 2, 3]])
    assert pad_ids(ids, 5).tolist() == [[1, 2, 3, 0, 0]] and pad_ids(ids, 2).tolist() == [[1, 2]]
    assert (prompt_width(30), prompt_width(33), prompt_width(70_000)) == (32, 48, 70_000)
