"""The plugin inside vLLM: greedy ids equal the ids of `generate`.

vLLM answers eight prompts at once, computes prompts in chunks that split images, and caches
prefixes. One process answers all prompts of a family.
"""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from plugin_runs import ENGINE, MAX_TOKENS, QWEN_CHAT, ask_vllm, expected_answers, wide_qwen3
from servers import openai_client, user_message
from small_world import TEXTS, stepprune
from tiny_llava_next import tiny_llava_next, tiny_next_config
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import load_policy, save_policy
from stepprune_jax.checkpoints.shipped import SHAPES_QWEN
from stepprune_jax.inference.request import read_request
from stepprune_jax.integrations.vllm_plugin import VARIABLE
from stepprune_jax.testing import tiny_tokenizer
from tools.bench.vllm_server import Vllm

NUM_PROMPTS = 24
ALL = {"pruner": "all", "budget": "all"}


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, with paths of its images."""

    text: str
    images: tuple[str, ...]


def as_prompt(model, question):
    """Returns a question as `plugin_process.py` reads it."""
    request = read_request(model, [question.text], [list(question.images)])
    image_id = model.config.image_token_id
    ids = [image_id if token < 0 else token for token in request.ids[0]]
    return {"ids": ids, "images": list(question.images)}


def make_run(model, setting, questions, **fields):
    prompts = [as_prompt(model, question) for question in questions]
    return {"setting": setting, "max_tokens": MAX_TOKENS, "prompts": prompts} | fields


def texts_and_images(questions):
    return [one.text for one in questions], [list(one.images) for one in questions]


def write_questions(folder, sizes, max_images=2):
    """Writes random images of the given sizes in pixels, and asks random questions about them.

    Each image has two questions, so a method that reads the question must not reuse kept tokens.
    """
    random, questions = np.random.default_rng(5), []
    for number in range(NUM_PROMPTS // 2):
        files = []
        for index in range(random.integers(1, max_images + 1)):
            file = folder / f"{number}_{index}.png"
            noise(100 * number + index, sizes[random.integers(len(sizes))]).save(file)
            files.append(str(file))
        for text in random.choice(TEXTS, 2, replace=False):
            questions.append(Question(str(text), tuple(files)))
    return questions


def wide_llava_next(folder):
    """Writes a tiny LLaVA-NeXT that vLLM takes."""
    raw: Any = tiny_next_config(len(tiny_tokenizer()))
    text = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    text["max_position_embeddings"] = ENGINE["max_model_len"]
    tiny_llava_next(folder, text_config=raw["text_config"] | text)
    processor = {
        "processor_class": "LlavaNextProcessor",
        "patch_size": 8,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "llava", "llava_next"])
def family(request, tmp_path_factory, wide_llava, wide_qwen):
    """The folder of a model, sizes of images that need no resizing, and methods with budgets."""
    folder = tmp_path_factory.mktemp(request.param)
    policy = folder / "policy.safetensors"
    if "qwen" in request.param:
        save_policy(
            stepprune(feature_width=64, text_width=64, draw=0.0).replace(stats=None), policy
        )
        model = wide_qwen if request.param == "qwen2_5_vl" else wide_qwen3(folder / "model")
        sizes = [(8 * rows, 8 * columns) for rows, columns in ((2, 8), (8, 2), (4, 4), (6, 5))]
        settings = [{"pruner": "divprune", "budget": "1/3"}, {"pruner": "visionzip", "budget": 6}]
        return model, sizes, [*settings, {"policy": str(policy), "budget": 5}], "original"
    save_policy(stepprune(text_width=64, draw=0.0), policy)
    if request.param == "llava":
        model, sizes = wide_llava, [(24, 24)]
    else:
        model, sizes = wide_llava_next(folder / "model"), [(48, 24), (24, 48), (48, 48)]
    settings = [{"pruner": "divprune", "budget": "1/3"}]
    if request.param == "llava":  # refused for LLaVA-NeXT
        settings.append({"pruner": "visionzip", "budget": 4})
    # The policy keeps at most half of the nine tokens of a LLaVA-1.5.
    return model, sizes, [*settings, {"policy": str(policy), "budget": 4}], "compact"


def test_answers_equal_those_of_generate(family, tmp_path):
    folder, sizes, settings, positions = family
    model = load_vlm(folder, dtype=jnp.float32, progress=False)
    questions = write_questions(tmp_path, sizes)
    # The last setting is asked twice, so that vLLM caches prompts.
    all_settings = (ALL, *settings, settings[-1])
    runs = [make_run(model, setting, questions) for setting in all_settings]
    unpruned, *pruned, repeated = ask_vllm(tmp_path, folder, runs)
    (alone,) = ask_vllm(tmp_path, folder, [make_run(model, None, questions)])
    assert repeated["token_ids"] == pruned[-1]["token_ids"]
    assert sum(repeated["num_cached_tokens"]) > sum(pruned[-1]["num_cached_tokens"])
    assert unpruned["token_ids"] == alone["token_ids"]
    assert unpruned["num_prompt_tokens"] == alone["num_prompt_tokens"]
    for setting, answers in zip(settings, pruned, strict=True):
        expected = expected_answers(model, setting, *texts_and_images(questions), positions)
        different = [
            (setting, question, token_ids, answer)
            for question, token_ids, answer in zip(
                questions, answers["token_ids"], expected, strict=True
            )
            if tuple(token_ids) != answer.token_ids
        ]
        assert not different, f"{len(different)} of {NUM_PROMPTS}: {different[0]}"
        num_dropped = [answer.visual_tokens - answer.kept for answer in expected]
        lengths = zip(
            alone["num_prompt_tokens"], answers["num_prompt_tokens"], num_dropped, strict=True
        )
        assert all(total - dropped == pruned for total, pruned, dropped in lengths)
        assert answers["token_ids"] != alone["token_ids"]


@pytest.mark.parametrize("budget", [16, "1/4"])
def test_a_shipped_policy_answers_as_in_generate(tmp_path, budget):
    model = load_vlm(SHAPES_QWEN, dtype=jnp.float32, progress=False)
    policy = load_policy("shapes_qwen")
    # Draws are seeded by the pixels, which vLLM resizes differently.
    policy = policy.replace(config=dataclasses.replace(policy.config, draw=0.0))
    file = save_policy(policy, tmp_path / "policy.safetensors")
    setting = {"policy": str(file), "budget": budget}
    questions = write_questions(tmp_path, [(96, 96), (72, 96), (104, 80)], max_images=1)
    questions = [
        dataclasses.replace(question, text=f"what color is the {shape} ?")
        for question, shape in zip(questions, ["square", "triangle"] * 12, strict=True)
    ]
    (answers,) = ask_vllm(tmp_path, SHAPES_QWEN, [make_run(model, setting, questions)])
    expected = expected_answers(model, setting, *texts_and_images(questions), "original")
    assert [tuple(ids) for ids in answers["token_ids"]] == [one.token_ids for one in expected]


def test_a_server_loads_the_plugin_by_its_entry_point(tmp_path, wide_qwen):
    """An unmodified `vllm serve` with the setting has shorter prompts."""
    file = noise(1, (48, 48))
    num_tokens = []
    for settings in ({}, {VARIABLE: json.dumps({"pruner": "grid", "budget": 9})}):
        flags = ("--dtype", "float32", "--enforce-eager", *QWEN_CHAT)
        with (
            Vllm(wide_qwen, tmp_path / "log", *flags, settings=settings) as engine,
            openai_client(engine.address) as client,
        ):
            answer = client.chat.completions.create(
                model=engine.name, messages=[user_message("red", file)], max_tokens=2
            )
        num_tokens.append(answer.usage.prompt_tokens)
    assert num_tokens[0] - num_tokens[1] == 36 - 9
