"""Configurations of models, image processors, policies and runs: taken, or refused by field."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile import VALUES, cases, changed, damaged, one_line
from hypothesis import given
from hypothesis import strategies as st
from tiny_llava_next import tiny_next_config
from tiny_qwen import qwen_tokenizer, tiny_qwen3_config, tiny_qwen_config

from stepprune_jax import configurations
from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.policy import load_policy, save_policy
from stepprune_jax.models.config import Normalisation
from stepprune_jax.models.llava.images import LlavaImageSettings, to_hf
from stepprune_jax.policy import PolicyConfig, init_policy
from stepprune_jax.selectors import StepPrune
from stepprune_jax.selectors.calibration import Calibration
from stepprune_jax.testing import tiny_hf_config
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir.checkpoints import claim

LLAVA = tiny_hf_config()
ORIGINAL = LLAVA | {"mm_vision_tower": "vision", "mm_projector_type": "mlp2x_gelu"}
CLIP_PROCESSOR = to_hf(LlavaImageSettings(), Normalisation())
QWEN_PROCESSOR = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "do_resize": True, "do_rescale": True},
    **{"min_pixels": 64, "max_pixels": 4096, "patch_size": 4, "temporal_patch_size": 2},
    **{"merge_size": 2, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.3] * 3},
}
MODELS = {
    "llava": (LLAVA, CLIP_PROCESSOR),
    "original": (ORIGINAL, CLIP_PROCESSOR),
    "next": (tiny_next_config(), CLIP_PROCESSOR | {"size": 24, "crop_size": 24}),
    "qwen": (tiny_qwen_config(qwen_tokenizer()), QWEN_PROCESSOR),
    "qwen3": (tiny_qwen3_config(qwen_tokenizer()), QWEN_PROCESSOR),
}


@pytest.mark.parametrize("name", MODELS)
@cases(80)
@given(data=st.data())
def test_folders_of_models(tmp_path_factory, name, data):
    folder = tmp_path_factory.getbasetemp() / name
    folder.mkdir(exist_ok=True)
    config, processor = MODELS[name]
    changes = data.draw(st.sampled_from([(True, False), (False, True)]))
    for file, raw, change in zip(
        ("config.json", "preprocessor_config.json"), (config, processor), changes, strict=True
    ):
        (folder / file).write_text(json.dumps(data.draw(changed(raw)) if change else raw))
    with one_line():
        backbone = inspect_folder(folder).backbone
        config = backbone.config
        numbers = np.array((config.text.rope_theta, config.text.rms_norm_eps), np.float32)
        assert np.isfinite(numbers).all() and (numbers > 0).all()
        assert config.text.num_layers <= 1024 and config.max_image_tokens >= 1
        found = backbone.image_settings(folder)
        assert all(math.isfinite(x) and x > 0 for x in config.normalisation.std)
        if isinstance(found, LlavaImageSettings):
            assert found.crop_to <= found.resize_to <= 8192


CALIBRATION = Calibration((1.0, 2.5), (3.0, 0.0), (1.0, 0.2), (0.0, 0.2), 9.0, 4).as_json()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    config = PolicyConfig(
        feature_width=4, text_width=4, num_heads=1, mlp_ratio=1, encoder_layers=1, decoder_layers=1
    )
    params = jax.tree.map(jnp.ones_like, init_policy(jax.random.key(0), config))
    path = save_policy(
        StepPrune(params=params, config=config, stats=None), tmp_path_factory.mktemp("policy") / "p"
    )
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
    except UserError as error:  # weights that do not fit are a list
        assert str(file) in str(error)
    else:
        assert math.isfinite(found.stop_bias)


SHAPES = configurations.load("shapes")
FIELDS = sorted(name for name in SHAPES.flat() if not name.startswith(("policy.", "autoselect.")))


@cases(60)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
def test_runs(changes):
    with one_line():
        SHAPES.replace(changes)


@cases(30)
@given(data=st.data())
def test_the_description_of_a_run(tmp_path_factory, data):
    folder, run = tmp_path_factory.getbasetemp(), SHAPES
    (folder / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
    raw = data.draw(changed({"config": run.flat(), "model": "m", "data": "d"}))
    raw = json.dumps(raw).encode()
    (folder / "run.json").write_bytes(data.draw(st.just(raw) | damaged(raw)))
    try:
        claim(folder, run, "m", "d")
    except UserError as error:  # differences are a list
        said = str(error)
        assert str(folder) in said and ("\n" not in said or "These differ:\n" in said)
