"""LLaVA-NeXT equals `transformers`: pixels, token order, logits and answers."""

import json
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import torch
import transformers
from hf_reference import assert_close, make_pair
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
from stepprune_jax.checkpoints.load import load_vlm
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

# (height, width) of images: one for each grid of tiles, enlarged and reduced, with padding on each
# axis, and so narrow that the tiles contain no patch or only newline tokens.
SHAPES = ((50, 70), (20, 90), (9, 8), (64, 31), (47, 48), (24, 50), (4, 400), (1, 700), (700, 1))
STEPS = 6
MODEL = transformers.LlavaNextForConditionalGeneration


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(MODEL, tiny_llava_next(tmp_path_factory.mktemp("next")))


def image(number):
    """Returns a random image with the shape of a number in `SHAPES`."""
    return noise(number, SHAPES[number])


def processed(pair, images):
    """Returns the pixels of images by the reference's image processor."""
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
        normalised = backbone.normalise(ours).values
        np.testing.assert_array_equal(normalised, theirs["pixel_values"])
        expected = pair.torch.model.get_image_features(**theirs).pooler_output[0]
        tokens = project(pair.model.params, encode(pair.model.params, ours)[0])
        assert backbone.num_tokens(backbone.grids(ours)).tolist() == [len(expected)]
        assert tokens.shape[1] == backbone.num_padded_tokens(ours)
        assert_close(tokens[0, : len(expected)], expected, what=f"image {number}")
    assert encode._cache_size() == 3  # for 3, 4 and 5 tiles, regardless of the aspect ratio


def test_taps_have_the_order_of_tokens(pair):
    """The hidden state of the projected block equals the features, after the class token."""
    model = pair.model
    pixels = model.backbone.preprocess(model.image_settings, [image(0), image(2)])
    taps = [Tap(kind, -2) for kind in ("hidden", "keys", "attention", "received", "query", "tile")]
    encode = jax.jit(model.backbone.encode_image, static_argnames="taps")
    features, tapped = encode(model.params, pixels, taps=tuple(taps))
    values = (tapped[f"{kind}.-2"] for kind, _ in taps)
    hidden, keys, attention, received, query, tile = values
    np.testing.assert_array_equal(hidden[:, 1:], features)
    other_taps = (keys.sum((1, 3)), attention.sum(1))
    assert all(tap.shape == (2, 52) for tap in other_taps) and query.shape == (2, 4, 8)
    for row, (rows, columns) in enumerate(((4, 6), (3, 2))):
        newlines = 9 + np.arange(rows) * (columns + 1) + columns
        is_patch = np.arange(51) < 9 + rows * (columns + 1)
        is_patch[newlines] = False
        without_class_token = (tap[:, 1:] for tap in other_taps)
        for values in (received, tile + 1, features.any(2), *without_class_token):
            np.testing.assert_array_equal(np.asarray(values[row]) != 0, is_patch)
    assert tile[0, 9:15].tolist() == [1, 1, 1, 2, 2, 2]
    assert tile[0, 30:36].tolist() == [3] * 3 + [4] * 3


@hypothesis.settings(max_examples=200)
@hypothesis.given(height=st.integers(1, 3000), width=st.integers(1, 3000))
def test_sizes_equal_the_reference(height, width):
    theirs = tuple(select_best_resolution((height, width), SIZES))
    assert best_size(height, width, tuple(map(tuple, SIZES))) == theirs
    pixels = np.broadcast_to(np.uint8(0), (3, height, width))
    fitted = get_patch_output_size(pixels, theirs, ChannelDimension.FIRST)
    assert fitted_size(height, width, theirs) == fitted
    tile_grid = [side // 24 for side in theirs]
    rows, columns = unpadded_grid(height, width, *(24 * tiles for tiles in tile_grid))
    expected_count = LlavaNextProcessor._get_unpadded_features(
        None, height, width, 24, 24, *tile_grid
    )
    assert (rows * columns, rows) == expected_count


# Prompts with the numbers of their images in `SHAPES`.
QUESTIONS = (
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
    """Returns the reference's greedy answer to our prompt, with one id per visual token."""
    backbone, tokenizer = pair.model.backbone, pair.model.tokenizer
    text = backbone.conversation([backbone.place_images(prompt, len(numbers))])
    images = [processed(pair, [image(number)]) for number in numbers]
    token_counts = iter(
        [len(pair.torch.model.get_image_features(**x).pooler_output[0]) for x in images]
    )
    ids = []
    for token in tokenize_with_images(tokenizer, text, len(numbers)):
        image_token_id = [pair.model.config.image_token_id]
        ids += image_token_id * next(token_counts) if token == IMAGE_TOKEN else [token]
    inputs = processed(pair, [image(number) for number in numbers]) if numbers else {}
    ids = torch.tensor([ids])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None}
    output = pair.torch.generate(input_ids=ids, attention_mask=mask, **inputs, **options)
    return output[0, ids.shape[1] :].tolist()


def ask(model, questions, *arguments, **options):
    prompts = [prompt for prompt, _ in questions]
    images = [list(map(image, numbers)) for _, numbers in questions]
    common_options = {"sampling": Sampling(stop_ids=()), "options": RunOptions(STEPS)}
    return generate(model, prompts, images, *arguments, **common_options, **options)


def assert_answers_equal(pair, questions):
    """Asserts that each row of a batch of answers equals the reference's answer to one question."""
    for (prompt, numbers), answer in zip(questions, ask(pair.model, questions), strict=True):
        assert list(answer.token_ids) == answer_of_reference(pair, prompt, numbers), prompt


@pytest.mark.supports("llava_next", "answer")
def test_answers_equal_the_reference(pair):
    assert_answers_equal(pair, QUESTIONS)


# Pruners that need the tokens of an image on one grid.
UNSUPPORTED = ("grid", "downsample", "topv", "clse", "prumerge", "prumerge_plus", "holov")
KEEP_IMAGES = [name for name, kind in PRUNERS.items() if kind.keeps_images]
# Supported pruners that need no published weights.
SUPPORTED = [
    name
    for name in PRUNERS
    if name not in (*UNSUPPORTED, *KEEP_IMAGES, "glimpseprune", "visionselector")
]
QUICK = ("cls", "visionzip", "fastv", "stepprune")
OPTIONS = {
    name: {"average": False} for name in ("clse", "pyramiddrop", "sparsevlm", "sparsevlm_v2")
}
OPTIONS |= {"fastv": {"layer": 1}, "dart": {"layer": 1}}
POLICIES = {"stepprune": stepprune, "autoselect": one_shot}
BUDGET = 8  # less than half of the smallest image


def make_pruner(name, budget):
    policy = POLICIES[name]() if name in POLICIES else None
    budget = None if name == "all" else budget
    return build_pruner(name, budget, policy=policy, options=OPTIONS.get(name))


@pytest.mark.parametrize("name", quick_or_slow(SUPPORTED, QUICK))
def test_pruners_keep_their_budget(pair, name):
    questions = QUESTIONS[5:9]
    results = ask(pair.model, questions, make_pruner(name, BUDGET))
    for (_, numbers), answer in zip(questions, results, strict=True):
        sizes = pair.model.backbone.num_tokens(np.array(answer.grids))
        assert answer.visual_tokens == sizes.sum()
        # DART also keeps its pivots.
        expected_counts = {"all": sizes.sum(), "dart": (BUDGET + 4) * len(numbers)}
        assert answer.kept == expected_counts.get(name, BUDGET * len(numbers))


def test_a_budget_of_all_tokens_gives_the_unpruned_answers(pair):
    policy = build_pruner("stepprune", 51, policy=stepprune(max_steps=51))
    pruned, expected = (ask(pair.model, QUESTIONS[5:9], *x) for x in ((policy,), ()))
    assert [x.token_ids for x in pruned] == [x.token_ids for x in expected]


@pytest.mark.parametrize("name", ["stepprune", "autoselect"])
def test_policies_do_not_keep_newline_tokens(pair, name):
    """Newline tokens carry no information, so only a budget above all patches keeps them."""
    newlines = {9 + 7 * line + 6 for line in range(6)}
    pruners = [POLICIES[name]()] if name == "stepprune" else []
    for pruner in (make_pruner(name, 24), *pruners):
        (result,) = ask(pair.model, [("red", (4,))], pruner)
        assert result.kept and not newlines & set(result.kept_indices[0])


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_pruners_that_need_one_grid_are_refused(pair, name):
    config = pair.model.config
    with pytest.raises(ValueError, match=f"^{name}: it needs tokens on one grid"):
        build_pruner(name, 5).check(config, config.max_image_tokens)


def test_cls_keeps_equally_many_patches_of_each_tile(pair):
    """The authors' program of VisionZip ranks patches within tiles; newline tokens come last."""
    model, picture = pair.model, image(4)
    ours = model.backbone.preprocess(model.image_settings, [picture])
    theirs = processed(pair, [picture])["pixel_values"][0]
    tower = pair.torch.model.vision_tower
    block = model.config.class_token_block
    attention = tower(theirs, output_attentions=True).attentions[block][:, :, 0, 1:].mean(1)
    assert ours.tile_grid.tolist() == [[2, 2]] and ours.grid.tolist() == [[6, 6]]
    (result,) = ask(model, [("red", (4,))], make_pruner("cls", 47))
    expected = set()
    for tile, row in enumerate(attention):
        for patch in row.topk(2).indices.tolist():
            patch_row, column = divmod(patch, 3)
            patch_row, column = patch_row + 3 * ((tile - 1) // 2), column + 3 * ((tile - 1) % 2)
            expected.add(patch if tile == 0 else 9 + 7 * patch_row + column)
    assert set(result.kept_indices[0][:10]) == expected  # the tokens that are selected first
    newlines = {9 + 7 * patch_row + 6 for patch_row in range(6)}
    assert len(newlines & set(result.kept_indices[0])) == 2


LAYOUTS = (tiny_llava_next, layouts.new_next, layouts.original_next)


@pytest.mark.parametrize("mistral", [False, True])
@pytest.mark.parametrize("write", LAYOUTS)
def test_every_layout_is_loaded_and_saved(tmp_path, write, mistral):
    folder = write(tmp_path / "from", mistral=mistral)
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    assert model.backbone.name == "llava_next"
    assert model.config.prompts == ("mistral" if mistral else "vicuna")
    save_vlm(model, tmp_path / "to")
    reloaded = load_vlm(tmp_path / "to", dtype=jnp.float32, progress=False)
    assert type(reloaded.backbone) is type(model.backbone)
    assert reloaded.image_settings == model.image_settings
    rows = model.config.text.vocab_size  # saving adds an image token to the original vocabulary
    embed, head = (reloaded.params["language"][name] for name in ("embed", "head"))
    embed["embedding"], head["kernel"] = embed["embedding"][:rows], head["kernel"][:, :rows]
    jax.tree.map(np.testing.assert_array_equal, reloaded.params, model.params)
    assert reloaded.config.sizes == model.config.sizes
    theirs = MODEL.from_pretrained(tmp_path / "to")
    assert theirs.config.text_config.model_type == ("mistral" if mistral else "llama")
    newline = theirs.model.image_newline.detach().numpy()
    np.testing.assert_array_equal(newline, model.params["newline"]["embedding"])


def test_answers_of_a_mistral_equal_the_reference(tmp_path):
    pair = make_pair(MODEL, tiny_llava_next(tmp_path, mistral=True))
    assert_answers_equal(pair, QUESTIONS[5:8])


def test_prompts_equal_the_templates_of_the_authors():
    turns = [LlavaNext.place_images("What?", 1), "A dog.", "Why?"]
    assert LlavaNext.conversation(turns[:1]).endswith("questions. USER: <image>\nWhat? ASSISTANT:")
    instruct = LlavaNextMistral.conversation
    assert instruct(turns[:1]) == "[INST] <image>\nWhat? [/INST]"
    assert instruct(turns) == "[INST] <image>\nWhat? [/INST] A dog. </s>[INST] Why? [/INST]"
    assert instruct(["Q"], "Be brief.") == "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nQ [/INST]"


# The chat templates of the Hugging Face files have the same turns without the system prompt.
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
    ("vocab_size", "kind", "system", "turns_text"),
    [
        (128_256, LlavaNextLlama3, LLAMA_3_SYSTEM, LLAMA_3_TURNS),
        (128_320, LlavaNextLlama3, LLAMA_3_SYSTEM, LLAMA_3_TURNS),
        (64_000, LlavaNextYi, YI_SYSTEM, YI_TURNS),
        (64_064, LlavaNextYi, YI_SYSTEM, YI_TURNS),
    ],
)
def test_the_vocabulary_size_decides_the_prompt_template(vocab_size, kind, system, turns_text):
    """Each vocabulary has its original size and its padded size in the Hugging Face layout."""
    backbone = LlavaNext.read(tiny_next_config(vocab_size), None)
    assert type(backbone) is kind
    turns = [backbone.place_images("What?", 1), "A dog.", "Why?"]
    assert backbone.conversation(turns) == system + turns_text
    assert backbone.conversation([*turns, None]) == system + turns_text
    assert backbone.published_prompts(turns) == (system + turns_text, turns_text)
    first_turn, _ = (system + turns_text).split("A dog.")
    assert backbone.conversation(turns[:2]) == f"{first_turn}A dog.{kind.END}"
    with_system = backbone.conversation(turns, "Be brief.")
    assert with_system == kind.BEGIN.format("system") + f"Be brief.{kind.END}" + turns_text
    for count in range(1, 4):
        assert backbone.conversation(turns).startswith(backbone.conversation(turns[:count]))


@pytest.mark.parametrize("vocab_size", [32_000, 32_064, 63_999, 64_065, 128_255, 152_064])
def test_other_vocabulary_sizes_have_the_prompts_of_vicuna(vocab_size):
    assert type(LlavaNext.read(tiny_next_config(vocab_size), None)) is LlavaNext


@pytest.mark.parametrize("end", ["</s> ", "<\\\\s> ", " </s>", "\\n"])
def test_a_chat_template_with_other_prompts_causes_a_warning(pair, tmp_path, caplog, end):
    content = "{{ m['content'][0]['text'] }}"
    user_turn = f"{{% if m['role'] == 'user' %}}[INST] {content} [/INST]"
    assistant_turn = f"{{% else %}} {content}{{{{ '{end}' }}}}{{% endif %}}"
    template = f"{{% for m in messages %}}{user_turn}{assistant_turn}{{% endfor %}}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    backbone = LlavaNextMistral(pair.model.config)
    warn_of_template(tmp_path, backbone, pair.model.tokenizer)
    assert len(caplog.records) == (end == "\\n")


INVALID_CONFIG = (
    ({"image_grid_pinpoints": []}, "image_grid_pinpoints is [], expected a list of at least one"),
    ({"image_grid_pinpoints": [[24, 50]]}, "[24, 50] is not of whole tiles of 24 x 24 pixels"),
    (
        {"image_grid_pinpoints": [[240, 240]]},
        "939 visual tokens of an image do not fit the model's 256",
    ),
    ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
)
INVALID_PROCESSOR = (
    ({"crop_size": 32, "size": 32}, "crop_size is 32, the model takes 24"),
    ({"image_grid_pinpoints": SIZES[:2]}, "image_grid_pinpoints is not that of config.json"),
    ({"image_processor_type": "Qwen2VLImageProcessor"}, "unsupported image processor"),
)
INVALID_TEXT = (
    ({"sliding_window": 64}, "sliding_window is 64, expected null"),
    ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        *(("config.json", *case) for case in INVALID_CONFIG),
        *(("preprocessor_config.json", *case) for case in INVALID_PROCESSOR),
        *(("text_config", *case) for case in INVALID_TEXT),
    ],
)
def test_unsupported_fields_are_refused_before_weights_are_read(tmp_path, file, fields, message):
    folder = tiny_llava_next(tmp_path, mistral=True)
    (folder / "model.safetensors").unlink()
    path = folder / ("config.json" if file == "text_config" else file)
    raw = json.loads(path.read_text())
    (raw[file] if file == "text_config" else raw).update(fields)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        inspect_folder(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_mistral_with_the_default_window_is_refused(tmp_path):
    folder = tiny_llava_next(tmp_path, mistral=True)
    raw = json.loads((folder / "config.json").read_text())
    del raw["text_config"]["sliding_window"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="sliding_window is 4096, expected null"):
        inspect_folder(folder)


def test_the_original_layout_may_store_the_tower_in_another_folder(tmp_path):
    """The sizes of the original layout are (width, height)."""
    folder = layouts.original_next(tmp_path, with_tower=False)
    raw = json.loads((folder / "config.json").read_text()) | {"image_grid_pinpoints": [[24, 72]]}
    (folder / "config.json").write_text(json.dumps(raw))
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    assert model.config.sizes == ((72, 24),)


def test_a_limit_of_pixels_removes_larger_image_sizes(pair):
    backbone = pair.model.backbone.bound_images(pair.folder, max_pixels=24 * 48)
    assert backbone.config.sizes == ((24, 48), (48, 24)) and backbone.config.max_tiles == 3
    assert backbone.config.max_image_tokens == 33
    with pytest.raises(ValueError, match="max_pixels is 1151, expected an integer from 1152"):
        pair.model.backbone.bound_images(None, max_pixels=1151)
    with pytest.raises(ValueError, match="min_pixels is 5"):
        pair.model.backbone.bound_images(None, min_pixels=5)


def test_published_configurations_have_the_published_token_counts():
    config = find_backbone("llava-next-7b").config
    assert config.max_tiles == 5
    assert config.max_image_tokens == 2928  # 5 x 576 patches and 48 newline tokens
    assert [config.max_tokens_of_tiles(tiles) for tiles in (3, 4)] == [1776, 2376]
