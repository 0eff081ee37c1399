import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from stepprune_jax import FeatureStats, PolicyConfig, init_policy, testing
from stepprune_jax.checkpoints import safetensors as files
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import load_policy_for, model_identity
from stepprune_jax.checkpoints.policy import load_policy, read_about, save_policy
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.selectors import StepPrune
from stepprune_jax.selectors.calibration import Calibration

CONFIG = PolicyConfig(feature_width=8, text_width=6, width=4, num_heads=2, mlp_ratio=1)


@pytest.fixture
def policy():
    stats = FeatureStats(jnp.arange(8.0), 1 + jnp.arange(8.0), jnp.float32(7))
    return StepPrune(
        params=init_policy(jax.random.key(0), CONFIG), config=CONFIG, stats=stats, stop_bias=-0.75
    )


def rewrite(path, change_metadata=None, change=None):
    """Changes the metadata or the tensors of a policy file."""
    entries, metadata = files.read_contents(path)
    tensors = {name: files.read_tensor(entry) for name, entry in entries.items()}
    if change is not None:
        change(tensors)
    if change_metadata is not None:
        change_metadata(metadata)
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    files.write_file(path, specs, tensors.values(), metadata)


@pytest.mark.parametrize("with_stats", [True, False])
def test_a_loaded_policy_equals_the_saved_one(tmp_path, policy, with_stats):
    policy = policy if with_stats else policy.replace(stats=None)
    path = save_policy(policy, tmp_path / "new" / "policy.safetensors")
    loaded = load_policy(path)
    assert loaded.config == CONFIG and hash(loaded.config) == hash(CONFIG)
    assert loaded.stop_bias == -0.75
    assert jax.tree.structure(loaded) == jax.tree.structure(policy)
    jax.tree.map(np.testing.assert_array_equal, loaded, policy)
    assert list(path.parent.iterdir()) == [path]


def test_a_policy_of_another_model_with_equal_widths_causes_a_warning(tmp_path, policy, caplog):
    model, other_model = (
        inspect_folder(testing.tiny_llava(tmp_path / str(seed), seed=seed)) for seed in (0, 1)
    )
    path = save_policy(policy, tmp_path / "p", {"model": model_identity(model)})
    assert read_about(path) == {"model": model_identity(model)}
    load_policy_for(model, path)
    load_policy_for(other_model, save_policy(policy, tmp_path / "unknown"))
    assert not caplog.records
    load_policy_for(other_model, path)
    warning = f"p was trained with a model whose files are not those of {other_model.folder}"
    assert warning in caplog.text


def test_a_calibration_is_kept_with_the_policy(tmp_path, policy):
    table = Calibration((1.0, 2.5), (3.0, -1.0), (1.0, 0.25), (0.0, 0.5), 5.0, 4)
    path = save_policy(policy.replace(calibration=table), tmp_path / "p")
    assert load_policy(path).calibration == table
    for bad_json in ('{"mean_count": [1]}', '{"mean_count": 1'):
        rewrite(path, lambda metadata, text=bad_json: metadata.update(calibration=text))
        with pytest.raises(ValueError, match=r"/p: .*calibration"):
            load_policy(path)


def test_a_file_comes_before_a_shipped_policy_of_its_name(tmp_path, monkeypatch, policy):
    monkeypatch.chdir(tmp_path)
    assert load_policy("shapes").name == "stepprune"
    with pytest.raises(FileNotFoundError, match=r"no policy file at shape, nor .*shapes_qwen"):
        load_policy("shape")
    save_policy(policy, tmp_path / "shapes")
    assert load_policy("shapes").config == CONFIG
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_policy("~/shapes").config == CONFIG
    assert save_policy(policy, "~/saved").is_relative_to(tmp_path)


def test_the_safetensors_package_reads_a_policy_file(tmp_path, policy):
    path = save_policy(policy, tmp_path / "p.safetensors")
    tensors = safetensors.numpy.load_file(path)
    kernel = policy.params["encoder"]["block_0"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(tensors["encoder/block_0/mlp/up/kernel"], kernel)


def test_weights_of_lower_precision_are_widened(tmp_path, policy):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), policy.params)
    loaded = load_policy(save_policy(policy.replace(params=params), tmp_path / "p"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_one_error_lists_all_tensors_that_do_not_fit(tmp_path, policy):
    path = save_policy(policy, tmp_path / "p")

    def spoil(tensors):
        del tensors["stop"], tensors["stats/var"]
        tensors["decoder/start"] = np.zeros(5, np.float32)
        tensors["encoder/extra"] = np.zeros(2, np.float32)
        tensors["stats/mean"] = np.zeros(8, np.int32)

    rewrite(path, change=spoil)
    with pytest.raises(ValueError) as error:
        load_policy(path)
    for line in (
        "missing: stop",
        "wrong shape: decoder/start is [5], expected [4]",
        "wrong dtype: stats/mean is int32, expected floating point",
        "unused: encoder/extra",
    ):
        assert line in str(error.value)
    assert str(path) in str(error.value)


def changed_config(**changes):
    def change(metadata):
        metadata["config"] = json.dumps({**json.loads(metadata["config"]), **changes})

    return change


def test_an_older_file_with_the_remaining_gate_is_loaded(tmp_path, policy):
    path = save_policy(policy, tmp_path / "p")
    rewrite(path, changed_config(gate="vp"))
    assert load_policy(path).config == CONFIG


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (changed_config(colour="red", taste=1), "colour, taste"),
        (changed_config(encoder_layers=500), "encoder_layers"),
        (
            changed_config(gate="scale"),
            "PolicyConfig.gate is 'scale', expected 'vp', the only one$",
        ),
        (changed_config(feature_width=1 << 60), "feature_width"),
        (lambda m: m.update(config="{"), "PolicyConfig"),
        (lambda m: m.update(version="9"), "version 9"),
        (lambda m: m.update(stop_bias="[" * 100_000), "stop_bias"),
        (lambda m: m.pop("kind"), "not a policy"),
    ],
)
def test_the_error_names_bad_metadata(tmp_path, policy, change, field):
    path = save_policy(policy, tmp_path / "p")
    rewrite(path, change)
    with pytest.raises(ValueError, match=f"/p.*{field}"):
        load_policy(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoder/block_0/mlp/up/kernel", np.nan),
        ("encoder/block_0/mlp/up/kernel", 1e300),
        ("stats/var", -1.0),
    ],
)
def test_bad_numbers_in_weights_and_statistics_are_refused(tmp_path, policy, name, value):
    def spoil(tensors):
        tensors[name] = tensors[name].astype(np.float64)
        tensors[name].reshape(-1)[-1] = value

    path = save_policy(policy, tmp_path / "p")
    rewrite(path, change=spoil)
    with pytest.raises(ValueError, match=f"p: '{name}'"):
        load_policy(path)


def test_a_policy_that_could_not_be_loaded_is_not_saved(tmp_path, policy):
    wider_config = dataclasses.replace(CONFIG, width=8)
    with pytest.raises(ValueError, match="wrong shape: decoder/hazard/clock is"):
        save_policy(policy.replace(config=wider_config), tmp_path / "p")
    with pytest.raises(ValueError, match=r"stop_bias is 1e\+300"):
        save_policy(policy.replace(stop_bias=1e300), tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_a_policy_for_another_model_is_refused(policy):
    config = LlavaConfig.from_hf(testing.tiny_hf_config())
    with pytest.raises(ValueError, match=r"feature_width is 8.*32; its text_width is 6.*48"):
        policy.check_fits(config)
    StepPrune(config=PolicyConfig(feature_width=32, text_width=0, num_heads=4)).check_fits(config)
