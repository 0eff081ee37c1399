"""The timing of updates: what goes in is what was asked for, what comes out adds up."""

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
from stepprune_jax.training import dry_run, settings
from stepprune_jax.training.batches import Bucket
from tools.bench import training
from tools.bench.drawn_data import write_conversations, write_model

FIELDS = testing.tiny_hf_config()  # a vocabulary that the mesh divides
# Four questions of 16 words and their answers.
IDS = 160


def tiny_run(**changes):
    small = {"width": 8, "num_heads": 2, "mlp_ratio": 1, "encoder_layers": 1}
    fields = {f"{group}.{k}": v for group in ("policy", "autoselect") for k, v in small.items()}
    fields |= {"batch_size": 4, "optimizer.warmup": 1, "model.remat": True}
    return load_config("shapes").replace(fields | changes)


def encoded(folder):
    """The first conversation as ids and labels."""
    sample, *_ = read_conversations(folder / "train.json", folder / "images")
    return testing.llava_encoder(testing.tiny_tokenizer()).encode(sample.turns, 1)


@pytest.mark.parametrize("ids", [300, 301])
def test_conversations_have_the_length_that_is_asked_for(tmp_path, ids):
    assert len(encoded(write_conversations(tmp_path / "data", 2, ids)).ids) == ids
    with pytest.raises(ValueError, match=r"ids is 20, expected at least \d+"):
        write_conversations(tmp_path / "short", 1, 20)


def test_weights_are_drawn_in_their_places():
    mesh = build_mesh("fsdp=2", jax.devices()[:2])

    def leaf(*shape, axes=()):
        at = NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at)

    def about(x):
        return x.shape, x.dtype, x.sharding

    asked = {"up": {"kernel": leaf(2, 64, 32, axes=(None, "fsdp"))}, "norm": {"scale": leaf(8)}}
    drawn = random_weights(asked)
    assert jax.tree.map(about, drawn) == jax.tree.map(about, asked)
    deviations = drawn["up"]["kernel"].astype(jnp.float32).std((1, 2)).tolist()
    assert deviations == pytest.approx([1 / 8] * 2, rel=0.05) and deviations[0] != deviations[1]
    assert float(drawn["norm"]["scale"].min()) == 1


@pytest.mark.slow
def test_a_run_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_IMAGES", 8)
    run = tiny_run(mesh="data=2,fsdp=2,tensor=2")
    found = training.measure(run, FIELDS, 2, IDS, tmp_path)
    assert found.policy > 0 and found.fed > 0 and 0 <= found.wait < found.update
    assert found.peak is None  # a CPU does not say
    assert found.planned.total > 0
    # What remat does again is no work of the model; the policy is a part of the update.
    assert 0 < found.policy_flops < found.model_flops < found.flops
    setup = settings.make_step_config(run, Llava.read(FIELDS, None), settings.make_mesh(run))
    asked = encoded(tmp_path / "data")
    targets = sum(label >= 0 for label in asked.labels)
    widths = Bucket(-(-len(asked.ids) // 8) * 8, -(-len(asked.text) // 8) * 8, targets)
    traced = dry_run.trace_update(setup, jnp.float32, 4, widths)
    assert found.flops == traced_flops(traced.jaxpr)


@pytest.mark.slow
def test_a_run_on_sampled_sets_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_IMAGES", 8)
    run = tiny_run(mesh="data=2,fsdp=2,tensor=2", **{"policy_gradient.samples": 2})
    found = training.measure(run, FIELDS, 2, IDS, tmp_path)
    assert found.policy > 0 and 0 < found.policy_flops < found.flops


def test_the_lines_have_the_numbers():
    planned = Usage(0, 0, 0, 3 * 2**30)
    found = training.Measured(0.5, 0.05, 0.4, 0.04, 80e12, 100e12, 10e12, planned, 2**31)
    lines = "\n".join(training.report(found, 2, "a100-80"))
    for words in (
        "25.6% of 2 a100-80 (32.1% with recomputation by remat); 80 TFLOPs an update, 160 TF",
        "2.00 GiB on a device; the compiler planned 3.00 GiB",
        "0.05 s an update, 10.0% of its time",
        "0.04 s, 10.0% of an update with the batch at hand; 10.0% of its operations",
    ):
        assert words in lines


def test_a_shape_is_a_name_or_a_folder(tmp_path):
    folder = write_model(tmp_path / "model", FIELDS)
    config = ["--config", str(ROOT / "configs" / "shapes.py")]
    with pytest.raises(ValueError, match="--model 'llava-8b' is neither a file nor one of"):
        training.main([*config, "--model", "llava-8b"])
    with pytest.raises(ValueError, match=r"--ids is 9000, expected .*config.data.context_limit"):
        training.main([*config, "--model", str(folder), "--ids", "9000"])
