"""LLaVA-NeXT beside `transformers`: pixels, the order of tokens, logits and answers."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import torch
import transformers
from hf_reference import assert_close, random_reference
from quick import quick_or_slow
from small_world import one_shot, stepprune
from tiny_llava_next import SIZES, tiny_llava_next, tiny_next_config
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.image_utils import ChannelDimension
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from visual import noise

from stepprune_jax.checkpoints.chat_template import warn_of_template
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.data.prompts import IMAGE_TOKEN, tokenize_with_images
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.inference import RunOptions, Sampling, generate
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.llava_next.backbone import (
    LlavaNext,
    LlavaNextLlama3,
    LlavaNextMistral,
    LlavaNextYi,
)
from stepprune_jax.models.llava_next.images import best_size, fitted_size, unpadded_grid
from stepprune_jax.registry import PRUNERS, build_pruner

# Height and width of images: of each plan of tiles, enlarged and reduced, with bars on either side,
# and so narrow that no patch of the tiles remains, or only the ends of rows.
SHAPES = ((50, 70), (20, 90), (9, 8), (64, 31), (47, 48), (24, 50), (4, 400), (1, 700), (700, 1))
STEPS = 6


class Pair(NamedTuple):
    """The reference and ours, with the same weights."""

    torch: Any
    folder: Path
    model: VLM


def make_pair(folder, **changes):
    folder = tiny_llava_next(folder, **changes)
    model = random_reference(transformers.LlavaNextForConditionalGeneration, folder)
    return Pair(model, folder, load_vlm(folder, dtype=jnp.float32, progress=False))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("next"))


def image(number):
    """That of `SHAPES`."""
    return noise(number, SHAPES[number])


def processed(pair, images):
    """The reference's pixels of some images."""
    return LlavaNextImageProcessorPil.from_pretrained(pair.folder)(images, return_tensors="pt")


@pytest.fixture(scope="module")
def encode(pair):
    return jax.jit(pair.model.backbone.encode_image, static_argnames="taps")


def test_pixels_and_tokens_equal_the_reference(pair, encode):
    backbone, settings = pair.model.backbone, pair.model.image_settings
    project = jax.jit(backbone.project)
    for number in range(len(SHAPES)):
        theirs = processed(pair, [image(number)])
        ours = backbone.preprocess(settings, [image(number)])
        seen = backbone.normalise(ours).values
        np.testing.assert_array_equal(seen, theirs["pixel_values"])
        found = pair.torch.model.get_image_features(**theirs).pooler_output[0]
        tokens = project(pair.model.params, encode(pair.model.params, ours)[0])
        assert backbone.num_tokens(backbone.grids(ours)).tolist() == [len(found)]
        assert tokens.shape[1] == backbone.padded_tokens(ours)
        assert_close(tokens[0, : len(found)], found, what=f"image {number}")
    assert encode._cache_size() == 3  # of 3, 4 and 5 tiles, whatever the aspect ratio


def test_taps_are_in_the_order_of_tokens(pair):
    """The output of the projected block has the features; the first token is the class token."""
    model = pair.model
    pixels = model.backbone.preprocess(model.image_settings, [image(0), image(2)])
    taps = [Tap(kind, -2) for kind in ("hidden", "keys", "attention", "received", "query", "tile")]
    encode = jax.jit(model.backbone.encode_image, static_argnames="taps")
    features, tapped = encode(model.params, pixels, taps=tuple(taps))
    named = (tapped[f"{kind}.-2"] for kind, _ in taps)
    hidden, keys, attention, received, query, tile = named
    np.testing.assert_array_equal(hidden[:, 1:], features)
    parts = (keys.sum((1, 3)), attention.sum(1))
    assert all(part.shape == (2, 52) for part in parts) and query.shape == (2, 4, 8)
    for row, (rows, columns) in enumerate(((4, 6), (3, 2))):
        ends = 9 + np.arange(rows) * (columns + 1) + columns
        is_patch = np.arange(51) < 9 + rows * (columns + 1)
        is_patch[ends] = False
        for part in (received, tile + 1, features.any(2), *(part[:, 1:] for part in parts)):
            np.testing.assert_array_equal(np.asarray(part[row]) != 0, is_patch)
    assert (
        tile[0, 9:15].tolist() == [1, 1, 1, 2, 2, 2]
        and tile[0, 30:36].tolist() == [3] * 3 + [4] * 3
    )


@hypothesis.settings(max_examples=200)
@hypothesis.given(height=st.integers(1, 3000), width=st.integers(1, 3000))
def test_sizes_equal_the_reference(height, width):
    theirs = tuple(select_best_resolution((height, width), SIZES))
    assert best_size(height, width, tuple(map(tuple, SIZES))) == theirs
    pixels = np.broadcast_to(np.uint8(0), (3, height, width))
    fitted = get_patch_output_size(pixels, theirs, ChannelDimension.FIRST)
    assert fitted_size(height, width, theirs) == fitted
    plan = [side // 24 for side in theirs]
    rows, columns = unpadded_grid(height, width, *(24 * part for part in plan))
    counted = LlavaNextProcessor._get_unpadded_features(None, height, width, 24, 24, *plan)
    assert (rows * columns, rows) == counted


# Prompt, and numbers of its images.
ASKED = (
    *(("What is this?", (number,)) for number in range(6)),
    ("red", (0, 1)),
    ("is the red dog in <image> or in <image>?", (3, 2)),
    ("two", (4, 4)),
    ("What is in this picture? " * 3, (1,)),
    ("yes or no", ()),
    ("a dog?", ()),
    ("two", (7, 8)),
)


def answer_of_reference(pair, prompt, numbers):
    """Greedy ids after the prompt of ours, with as many places as its image has tokens."""
    backbone, tokenizer = pair.model.backbone, pair.model.tokenizer
    text = backbone.conversation([backbone.place_images(prompt, len(numbers))])
    images = [processed(pair, [image(number)]) for number in numbers]
    counts = iter([len(pair.torch.model.get_image_features(**x).pooler_output[0]) for x in images])
    ids = []
    for token in tokenize_with_images(tokenizer, text, len(numbers)):
        place = [pair.model.config.image_token_id]
        ids += place * next(counts) if token == IMAGE_TOKEN else [token]
    inputs = processed(pair, [image(number) for number in numbers]) if numbers else {}
    ids = torch.tensor([ids])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None}
    made = pair.torch.generate(input_ids=ids, attention_mask=mask, **inputs, **options)
    return made[0, ids.shape[1] :].tolist()


def answers(model, asked, *arguments, **options):
    prompts = [prompt for prompt, _ in asked]
    shown = [list(map(image, numbers)) for _, numbers in asked]
    return generate(
        model,
        prompts,
        shown,
        *arguments,
        sampling=Sampling(stop_ids=()),
        options=RunOptions(STEPS),
        **options,
    )


def test_answers_equal_the_reference(pair):
    """All in one batch, of which each row is as if alone."""
    found = answers(pair.model, ASKED)
    for (prompt, numbers), answer in zip(ASKED, found, strict=True):
        assert list(answer.token_ids) == answer_of_reference(pair, prompt, numbers), prompt


REFUSED = ("grid", "downsample", "topv", "clse", "prumerge", "prumerge_plus", "holov")
# Those that need no published weights.
ACCEPTED = [x for x in PRUNERS if x not in (*REFUSED, "glimpseprune", "visionselector")]
QUICK = ("cls", "visionzip", "fastv", "stepprune")
OPTIONS = {
    name: {"average": False} for name in ("clse", "pyramiddrop", "sparsevlm", "sparsevlm_v2")
}
OPTIONS |= {"fastv": {"layer": 1}, "dart": {"layer": 1}}
POLICIES = {"stepprune": stepprune, "autoselect": one_shot}
K = 8  # less than half of the smallest image


def pruner(name, budget):
    policy = POLICIES[name]() if name in POLICIES else None
    budget = None if name == "all" else budget
    return build_pruner(name, budget, policy=policy, options=OPTIONS.get(name))


@pytest.mark.parametrize("name", quick_or_slow(ACCEPTED, QUICK))
def test_pruners_keep_their_budget(pair, name):
    asked = ASKED[5:9]
    found = answers(pair.model, asked, pruner(name, K))
    for (_, numbers), answer in zip(asked, found, strict=True):
        sizes = pair.model.backbone.num_tokens(np.array(answer.grids))
        assert answer.visual_tokens == sizes.sum()
        kept = {"all": sizes.sum(), "dart": (K + 4) * len(numbers)}  # the pivots remain
        assert answer.kept == kept.get(name, K * len(numbers))


def test_a_budget_of_all_tokens_is_the_model(pair):
    chosen = build_pruner("stepprune", 51, policy=stepprune(max_steps=51))
    found, expected = (answers(pair.model, ASKED[5:9], *x) for x in ((chosen,), ()))
    assert [x.token_ids for x in found] == [x.token_ids for x in expected]


@pytest.mark.parametrize("name", ["stepprune", "autoselect"])
def test_policies_choose_no_ends_of_rows(pair, name):
    """They carry nothing; only a budget of more than all patches keeps them."""
    ends = {9 + 7 * line + 6 for line in range(6)}
    own = [POLICIES[name]()] if name == "stepprune" else []
    for chosen in (pruner(name, 24), *own):
        (found,) = answers(pair.model, [("red", (4,))], chosen)
        assert found.kept and not ends & set(found.kept_indices[0])


@pytest.mark.parametrize("name", REFUSED)
def test_pruners_that_need_one_grid_are_refused(pair, name):
    config = pair.model.config
    with pytest.raises(ValueError, match=f"^{name}: it needs tokens on one grid"):
        build_pruner(name, 5).check(config, config.max_image_tokens)


def test_tiles_have_equal_shares_of_what_their_class_tokens_attend_to(pair):
    """As in the authors' program of VisionZip; the ends of rows are kept last."""
    model, shown = pair.model, image(4)
    ours = model.backbone.preprocess(model.image_settings, [shown])
    theirs = processed(pair, [shown])["pixel_values"][0]
    tower = pair.torch.model.vision_tower
    block = model.config.class_token_block
    attention = tower(theirs, output_attentions=True).attentions[block][:, :, 0, 1:].mean(1)
    assert ours.plan.tolist() == [[2, 2]] and ours.grid.tolist() == [[6, 6]]
    (found,) = answers(model, [("red", (4,))], pruner("cls", 47))
    expected = set()
    for tile, row in enumerate(attention):
        for patch in row.topk(2).indices.tolist():
            line, column = divmod(patch, 3)
            line, column = line + 3 * ((tile - 1) // 2), column + 3 * ((tile - 1) % 2)
            expected.add(patch if tile == 0 else 9 + 7 * line + column)
    assert set(found.kept_indices[0][:10]) == expected  # the first that are chosen
    ends = {9 + 7 * line + 6 for line in range(6)}
    assert len(ends & set(found.kept_indices[0])) == 2


LAYOUTS = (tiny_llava_next, layouts.new_next, layouts.original_next)


@pytest.mark.parametrize("mistral", [False, True])
@pytest.mark.parametrize("write", LAYOUTS)
def test_every_layout_is_loaded_and_written(tmp_path, write, mistral):
    folder = write(tmp_path / "from", mistral=mistral)
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    assert model.backbone.name == "llava_next"
    assert model.config.prompts == ("mistral" if mistral else "vicuna")
    save_vlm(model, tmp_path / "to")
    again = load_vlm(tmp_path / "to", dtype=jnp.float32, progress=False)
    assert type(again.backbone) is type(model.backbone)
    assert again.image_settings == model.image_settings
    rows = model.config.text.vocab_size  # the original vocabulary has no image token
    again.params["language"]["embed"]["embedding"] = again.params["language"]["embed"]["embedding"][
        :rows
    ]
    again.params["language"]["head"]["kernel"] = again.params["language"]["head"]["kernel"][
        :, :rows
    ]
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert again.config.sizes == model.config.sizes
    theirs = transformers.LlavaNextForConditionalGeneration.from_pretrained(tmp_path / "to")
    assert theirs.config.text_config.model_type == ("mistral" if mistral else "llama")
    newline = theirs.model.image_newline.detach().numpy()
    np.testing.assert_array_equal(newline, model.params["newline"]["embedding"])


def test_mistral_answers_as_the_reference(tmp_path):
    pair = make_pair(tmp_path, mistral=True)
    asked = ASKED[5:8]
    for (prompt, numbers), answer in zip(asked, answers(pair.model, asked), strict=True):
        assert list(answer.token_ids) == answer_of_reference(pair, prompt, numbers), prompt


def test_prompts_are_those_of_the_authors():
    turns = [LlavaNext.place_images("What?", 1), "A dog.", "Why?"]
    assert LlavaNext.conversation(turns[:1]).endswith("questions. USER: <image>\nWhat? ASSISTANT:")
    instruct = LlavaNextMistral.conversation
    assert instruct(turns[:1]) == "[INST] <image>\nWhat? [/INST]"
    assert instruct(turns) == "[INST] <image>\nWhat? [/INST] A dog. </s>[INST] Why? [/INST]"
    assert instruct(["Q"], "Be brief.") == "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nQ [/INST]"


# The chat templates of the Hugging Face files have the turns without the system's words.
LLAMA_3_SYSTEM = (
    "<|start_header_id|>system<|end_header_id|>\n\nYou are a helpful language and vision "
    "assistant. You are able to understand the visual content that the user provides, and assist "
    "the user with a variety of tasks using natural language.<|eot_id|>"
)
LLAMA_3_TURNS = (
    "<|start_header_id|>user<|end_header_id|>\n\n<image>\nWhat?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA dog.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
YI_SYSTEM = "<|im_start|>system\nAnswer the questions.<|im_end|>"
YI_TURNS = (
    "<|im_start|>user\n<image>\nWhat?<|im_end|><|im_start|>assistant\nA dog.<|im_end|>"
    "<|im_start|>user\nWhy?<|im_end|><|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("rows", "kind", "system", "said"),
    [
        (128_256, LlavaNextLlama3, LLAMA_3_SYSTEM, LLAMA_3_TURNS),
        (128_320, LlavaNextLlama3, LLAMA_3_SYSTEM, LLAMA_3_TURNS),
        (64_000, LlavaNextYi, YI_SYSTEM, YI_TURNS),
        (64_064, LlavaNextYi, YI_SYSTEM, YI_TURNS),
    ],
)
def test_prompts_follow_the_vocabulary(rows, kind, system, said):
    """Reads vocabularies of the 34B and of Llama 3, in the original layout and in the other."""
    backbone = LlavaNext.read(tiny_next_config(rows), None)
    assert type(backbone) is kind
    turns = [backbone.place_images("What?", 1), "A dog.", "Why?"]
    assert backbone.conversation(turns) == system + said == backbone.conversation([*turns, None])
    assert backbone.published_prompts(turns) == (system + said, said)
    closed, _ = (system + said).split("A dog.")
    assert backbone.conversation(turns[:2]) == f"{closed}A dog.{kind.END}"
    asked = backbone.conversation(turns, "Be brief.")
    assert asked == kind.BEGIN.format("system") + f"Be brief.{kind.END}" + said
    for count in range(1, 4):
        assert backbone.conversation(turns).startswith(backbone.conversation(turns[:count]))


@pytest.mark.parametrize("rows", [32_000, 32_064, 63_999, 64_065, 128_255, 152_064])
def test_other_vocabularies_have_the_prompts_of_vicuna(rows):
    assert type(LlavaNext.read(tiny_next_config(rows), None)) is LlavaNext


@pytest.mark.parametrize(
    ("end", "named"), [("</s> ", 0), ("<\\\\s> ", 0), (" </s>", 0), ("\\n", 1)]
)
def test_a_chat_template_of_other_prompts_is_named(pair, tmp_path, caplog, end, named):
    said = "{{ m['content'][0]['text'] }}"
    turns = (
        f"{{% if m['role'] == 'user' %}}[INST] {said} [/INST]{{% else %}} {said}{{{{ '{end}' }}}}"
    )
    template = f"{{% for m in messages %}}{turns}{{% endif %}}{{% endfor %}}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    model = LlavaNextMistral(pair.model.config)
    warn_of_template(tmp_path, model, pair.model.tokenizer)
    assert len(caplog.records) == named


WRONG = (
    ({"image_grid_pinpoints": []}, "image_grid_pinpoints is [], expected a list of at least one"),
    ({"image_grid_pinpoints": [[24, 50]]}, "[24, 50] is not of whole tiles of 24 x 24 pixels"),
    (
        {"image_grid_pinpoints": [[240, 240]]},
        "939 visual tokens of an image do not fit the model's 256",
    ),
    ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
)
WRONG_PROCESSOR = (
    ({"crop_size": 32, "size": 32}, "crop_size is 32, the model takes 24"),
    ({"image_grid_pinpoints": SIZES[:2]}, "image_grid_pinpoints is not that of config.json"),
    ({"image_processor_type": "Qwen2VLImageProcessor"}, "unsupported image processor"),
)
WRONG_TEXT = (
    ({"sliding_window": 64}, "sliding_window is 64, expected null"),
    ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
)


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        *(("config.json", *case) for case in WRONG),
        *(("preprocessor_config.json", *case) for case in WRONG_PROCESSOR),
        *(("text_config", *case) for case in WRONG_TEXT),
    ],
)
def test_bad_files_are_refused_in_a_line_before_any_load(tmp_path, file, fields, said):
    folder = tiny_llava_next(tmp_path, mistral=True)
    (folder / "model.safetensors").unlink()
    path = folder / ("config.json" if file == "text_config" else file)
    raw = json.loads(path.read_text())
    (raw[file] if file == "text_config" else raw).update(fields)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        inspect_folder(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_mistral_without_a_word_of_its_window_is_refused(tmp_path):
    folder = tiny_llava_next(tmp_path, mistral=True)
    raw = json.loads((folder / "config.json").read_text())
    del raw["text_config"]["sliding_window"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="sliding_window is 4096, expected null"):
        inspect_folder(folder)


def test_the_tower_of_the_original_layout_may_be_stored_apart(tmp_path):
    """Which has sizes as (width, height)."""
    folder = layouts.original_next(tmp_path, with_tower=False)
    raw = json.loads((folder / "config.json").read_text()) | {"image_grid_pinpoints": [[24, 72]]}
    (folder / "config.json").write_text(json.dumps(raw))
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    assert model.config.sizes == ((72, 24),)


def test_weights_are_loaded_strictly(tmp_path):
    folder = tiny_llava_next(tmp_path)
    layouts.rename(folder, (("image_newline", "image_newlines"),))
    with pytest.raises(ValueError, match=r"missing \(1\):\s+image_newline (?s:.*)unused \(1\)"):
        load_vlm(folder, progress=False)


def test_images_are_bounded_by_a_number_of_pixels(pair):
    backbone = pair.model.backbone.bound_images(pair.folder, max_pixels=24 * 48)
    assert backbone.config.sizes == ((24, 48), (48, 24)) and backbone.config.max_tiles == 3
    assert backbone.config.max_image_tokens == 33
    with pytest.raises(ValueError, match="max_pixels is 1151, expected an integer from 1152"):
        pair.model.backbone.bound_images(None, max_pixels=1151)
    with pytest.raises(ValueError, match="min_pixels is 5"):
        pair.model.backbone.bound_images(None, min_pixels=5)


def test_published_shapes_have_the_published_counts():
    config = find_backbone("llava-next-7b").config
    assert (config.max_tiles, config.max_image_tokens) == (5, 2928)  # 5 x 576 and 48 ends of rows
    assert [config.tokens_of(tiles) for tiles in (3, 4)] == [1776, 2376]
