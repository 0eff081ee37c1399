"""Tests with vLLM, which `make test-serving` runs: elsewhere they are skipped by name."""

import json

import pytest
from servers import PATIENCE
from tiny_qwen import qwen_tokenizer, tiny_qwen, tiny_qwen_config

from stepprune_jax import testing
from stepprune_jax.models.config import Normalisation
from tools.bench.serving import CHAT
from tools.bench.vllm_server import PYTHON, Vllm


def pytest_collection_modifyitems(config, items):
    """Minutes each, and 3.5 GB of packages: only if this folder is asked for by its name."""
    asked = any("tests/serving/engine" in str(argument) for argument in config.args)
    reason = "vLLM: make test-serving" if asked else "with vLLM alone: make test-serving"
    for item in items:
        if "tests/serving/engine" in str(item.path) and not (asked and PYTHON.is_file()):
            item.add_marker(pytest.mark.skip(reason=reason))


# vLLM's attention on CPUs needs heads of 32 channels or more.
_HEADS = {"hidden_size": 64, "num_attention_heads": 2}


@pytest.fixture(scope="session")
def wide_llava(tmp_path_factory):
    """The folder of a tiny LLaVA that vLLM takes."""
    folder = tmp_path_factory.mktemp("wide_llava")
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 8,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    # Room for answers that take vLLM seconds, so that there is something to interrupt.
    text = _HEADS | {"num_key_value_heads": 2, "max_position_embeddings": 2048}
    return testing.tiny_llava(folder, text=text)


@pytest.fixture(scope="session")
def wide_qwen(tmp_path_factory):
    """The folder of a tiny Qwen2.5-VL that vLLM takes."""
    raw = tiny_qwen_config(qwen_tokenizer())
    folder = tiny_qwen(
        tmp_path_factory.mktemp("wide_qwen"),
        **_HEADS,
        num_key_value_heads=1,
        rope_scaling=raw["rope_scaling"] | {"mrope_section": [4, 6, 6]},
        vision_config=raw["vision_config"] | {"out_hidden_size": 64},
    )
    # vLLM normalizes pixels only if the file says so, as published files do.
    file = folder / "preprocessor_config.json"
    normalisation = {
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": list(Normalisation().mean),
        "image_std": list(Normalisation().std),
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | normalisation))
    return folder


# Tiny models need neither compiled kernels nor a measurement of the memory that images take.
_FLAGS = ("--dtype", "float32", "--enforce-eager", "--skip-mm-profiling", *CHAT)


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """Starts an engine for a model's folder once, and again at its address if it was killed."""
    engines = {}

    def run(folder):
        engine = engines.get(folder)
        if engine is None or not engine.is_alive:
            log = tmp_path_factory.mktemp("vllm") / "log"
            port = None if engine is None else engine.port
            engine = engines[folder] = Vllm(folder, log, *_FLAGS, port=port)
            engine.wait(4 * PATIENCE)
        return engine

    yield run
    for engine in engines.values():
        engine.kill()
