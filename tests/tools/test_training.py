"""The timing of updates: random data and weights of the requested sizes, and consistent results."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_run import ROOT, load_config

from experiments.pretrain.conversations import read_conversations
from stepprune_jax import testing
from stepprune_jax.efficiency.weights import random_weights
from stepprune_jax.flops import traced_flops
from stepprune_jax.models.llava import Llava
from stepprune_jax.parallel.compiling import Usage
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.training import dry_run, step_config
from stepprune_jax.training.batches import Bucket
from tools.bench import training
from tools.bench.drawn_data import write_conversations, write_model

FIELDS = testing.tiny_hf_config()  # The mesh divides the size of the vocabulary.
# Four questions of 16 words and their answers.
IDS = 160


def tiny_run(**changes):
    small_policy = {"width": 8, "num_heads": 2, "mlp_ratio": 1, "encoder_layers": 1}
    fields = {
        f"{group}.{name}": value
        for group in ("policy", "autoselect")
        for name, value in small_policy.items()
    }
    fields |= {"batch_size": 4, "optimizer.warmup": 1, "model.remat": True}
    return load_config("shapes").replace(fields | changes)


def encoded(folder):
    """Returns the first conversation as ids and labels."""
    sample, *_ = read_conversations(folder / "train.json", folder / "images")
    return testing.llava_encoder(testing.tiny_tokenizer()).encode(sample.turns, 1)


@pytest.mark.parametrize("ids", [300, 301])
def test_conversations_have_the_requested_length(tmp_path, ids):
    assert len(encoded(write_conversations(tmp_path / "data", 2, ids)).ids) == ids
    with pytest.raises(ValueError, match=r"ids is 20, expected at least \d+"):
        write_conversations(tmp_path / "short", 1, 20)


def test_random_weights_have_their_shardings():
    mesh = build_mesh("fsdp=2", jax.devices()[:2])

    def leaf(*shape, axes=()):
        sharding = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def properties(leaf_array):
        return leaf_array.shape, leaf_array.dtype, leaf_array.sharding

    abstract_params = {
        "up": {"kernel": leaf(2, 64, 32, axes=(None, "fsdp"))},
        "norm": {"scale": leaf(8)},
    }
    params = random_weights(abstract_params)
    assert jax.tree.map(properties, params) == jax.tree.map(properties, abstract_params)
    deviations = params["up"]["kernel"].astype(jnp.float32).std((1, 2)).tolist()
    assert deviations == pytest.approx([1 / 8] * 2, rel=0.05) and deviations[0] != deviations[1]
    assert float(params["norm"]["scale"].min()) == 1


@pytest.mark.slow
def test_a_run_with_the_gate_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_IMAGES", 8)
    run = tiny_run(mesh="data=2,fsdp=2,tensor=2")
    measurements = training.measure(run, FIELDS, 2, IDS, tmp_path)
    assert measurements.policy > 0 and measurements.fed > 0
    assert 0 <= measurements.wait < measurements.update
    assert measurements.peak is None  # A CPU does not report its memory.
    assert measurements.planned.total > 0
    # Recomputation by remat is no operation of the model.
    assert 0 < measurements.policy_flops < measurements.model_flops < measurements.flops
    setup = step_config.make_step_config(run, Llava.read(FIELDS, None), step_config.make_mesh(run))
    conversation = encoded(tmp_path / "data")
    targets = sum(label >= 0 for label in conversation.labels)
    padded = [-(-len(ids) // 8) * 8 for ids in (conversation.ids, conversation.text)]
    widths = Bucket(*padded, targets)
    traced = dry_run.trace_update(setup, jnp.float32, 4, widths)
    assert measurements.flops == traced_flops(traced.jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rloo", "warm_start"])
def test_a_run_without_the_gate_is_measured(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_IMAGES", 8)
    run = tiny_run(mesh="data=2,fsdp=2,tensor=2", recipe=recipe, **{"rloo.samples": 2})
    measurements = training.measure(run, FIELDS, 2, IDS, tmp_path)
    assert measurements.policy > 0 and 0 < measurements.policy_flops < measurements.flops


def test_the_report_has_the_measurements():
    planned = Usage(0, 0, 0, 3 * 2**30)
    measurements = training.Measured(0.5, 0.05, 0.4, 0.04, 80e12, 100e12, 10e12, planned, 2**31)
    lines = "\n".join(training.report(measurements, 2, "a100-80"))
    for words in (
        "25.6% of 2 a100-80 (32.1% with recomputation by remat); 80 TFLOPs an update, 160 TF",
        "2.00 GiB on a device; the compiler planned 3.00 GiB",
        "0.05 s an update, 10.0% of its time",
        "0.04 s, 10.0% of an update with the batch at hand; 10.0% of its operations",
    ):
        assert words in lines


def test_the_shape_of_the_model_is_a_name_or_a_folder(tmp_path):
    folder = write_model(tmp_path / "model", FIELDS)
    config = ["--config", str(ROOT / "configs" / "shapes.py")]
    with pytest.raises(ValueError, match="--model 'llava-8b' is neither a file nor one of"):
        training.main([*config, "--model", "llava-8b"])
    with pytest.raises(ValueError, match=r"--ids is 9000, expected .*config.data.context_limit"):
        training.main([*config, "--model", str(folder), "--ids", "9000"])
