"""Configurations of models, image processors, policies and runs: taken, or refused by field."""

import dataclasses
import importlib.util
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile import VALUES, cases, changed, damaged, one_line
from hypothesis import example, given
from hypothesis import strategies as st

from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.policy import Policy, load_policy, save_policy
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.llava.images import ImageSettings, hf_processor, settings_from_hf
from stepprune_jax.policy import PolicyConfig, init_policy
from stepprune_jax.pruning import Budget
from stepprune_jax.pruning.calibration import Calibration
from stepprune_jax.settings import read
from stepprune_jax.testing import qwen_tokenizer, tiny_hf_config, tiny_qwen_config
from stepprune_jax.training.settings import Run

MODEL = tiny_hf_config()
QWEN_PROCESSOR = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "do_resize": True, "do_rescale": True},
    **{"min_pixels": 64, "max_pixels": 4096, "patch_size": 4, "temporal_patch_size": 2},
    **{"merge_size": 2, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.3] * 3},
}


@cases(150)
@given(raw=changed(MODEL))
def test_models(raw):
    with one_line():
        config = LlavaConfig.from_hf(raw)
        numbers = (config.text.rope_theta, config.text.rms_norm_eps, config.vision.layer_norm_eps)
        assert all(np.isfinite(np.array(numbers, np.float32)))
        assert all(np.array(numbers, np.float32) > 0)
        assert max(config.text.num_layers, config.vision.num_layers) <= 1024


@cases(40)
@given(raw=changed(MODEL | {"mm_vision_tower": "vision", "mm_projector_type": "mlp2x_gelu"}))
def test_folders(tmp_path_factory, raw):
    folder = tmp_path_factory.getbasetemp() / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    with one_line():
        inspect_folder(folder)


QWEN = tiny_qwen_config(qwen_tokenizer())


@cases(60)
@given(raw=changed(QWEN), processor=changed(QWEN_PROCESSOR))
def test_models_whose_images_vary_in_size(tmp_path_factory, raw, processor):
    folder = tmp_path_factory.getbasetemp() / "qwen"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    with one_line(folder):
        config = inspect_folder(folder).config
        assert 1 <= config.min_pixels <= config.max_pixels and config.max_image_tokens >= 1
        config.family.image_settings(folder)


PROCESSOR = hf_processor(LlavaConfig.from_hf(MODEL), ImageSettings())["preprocessor_config.json"]


@cases(120)
@given(raw=changed(PROCESSOR))
def test_image_processors(raw):
    with one_line("here: "):
        found = settings_from_hf(raw, "here")
        assert found.std is None or all(math.isfinite(x) and x > 0 for x in found.std)
        assert found.crop_to is None or max(found.crop_to) <= 8192


CONFIG = PolicyConfig(feature_width=4, text_width=4, num_heads=1, mlp_ratio=1, encoder_layers=1)


CALIBRATION = Calibration((1.0, 2.5), (3.0, 0.0), (1.0, 0.2), (0.0, 0.2), 9.0, 4).as_json()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    config = dataclasses.replace(CONFIG, decoder_layers=1)
    params = jax.tree.map(jnp.ones_like, init_policy(jax.random.key(0), config))
    path = save_policy(Policy(params, config, None), tmp_path_factory.mktemp("policy") / "p")
    entries, metadata = safetensors.read_contents(path)
    tensors = [safetensors.read_tensor(entry) for entry in entries.values()]
    specs = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    return path, specs, tensors, metadata


@cases(12)
@given(data=st.data())
def test_policies(policy, data):
    path, specs, tensors, metadata = policy
    fields = data.draw(changed(json.loads(metadata["config"])))
    other = metadata | {"config": json.dumps(fields)}
    if data.draw(st.booleans()):
        other["stop_bias"] = json.dumps(data.draw(VALUES))
    if data.draw(st.booleans()):
        other["calibration"] = json.dumps(data.draw(changed(CALIBRATION)))
    file = path.with_name("changed")
    safetensors.write_file(file, specs, tensors, other)
    if not data.draw(st.integers(0, 3)):
        file.write_bytes(data.draw(damaged(file.read_bytes())))
    try:
        found = load_policy(file)
    except ValueError as error:  # weights that do not fit are a list
        assert str(file) in str(error)
    else:
        assert math.isfinite(found.stop_bias)


def shapes_run():
    """The fields of configs/shapes.py."""
    path = pathlib.Path(__file__).parents[2] / "configs" / "shapes.py"
    spec = importlib.util.spec_from_file_location("a_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config().to_dict()


@cases(60)
@given(raw=changed(shapes_run()))
@example(raw={**shapes_run(), "accelerator": {**shapes_run()["accelerator"], "utilisation": True}})
def test_runs(raw):
    with one_line("config"):
        read(Run, raw)


@cases(150)
@given(
    text=st.text(max_size=8)
    | st.from_regex(r"-?[0-9./%e]{1,8}", fullmatch=True)
    | st.just("1e999999999%")
)
def test_budgets(text):
    with one_line():
        budget = Budget.parse(text)
        assert budget.kind
