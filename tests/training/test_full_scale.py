"""The configurations of the paper's size, and a dry run of a model without weights."""

import json

import jax
import numpy as np
import pytest
from tiny_run import load_config, write_data

from stepprune_jax import testing
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.data.source import training_source
from stepprune_jax.efficiency.model_shapes import MODELS
from stepprune_jax.models import vlm
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.parallel.accelerators import ACCELERATORS
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.training import dry_run as dry_run_module
from stepprune_jax.training.batches import open_batches
from stepprune_jax.training.dry_run import dry_run
from stepprune_jax.training.optimizer import learning_rate
from stepprune_jax.training.settings import make_step_config

SEVEN_B = LlavaConfig.from_hf(MODELS["llava-7b"])


@pytest.mark.parametrize(("reading", "price"), [("gate", 0.15), ("literal", 0.01)])
def test_the_papers_run_has_the_papers_values(reading, price):
    run = load_config(f"llava7b:{reading}")
    setup = make_step_config(run, Llava(SEVEN_B), build_mesh(run.mesh, jax.devices()[:2]))
    assert (run.batch_size, setup.forward.rows, setup.forward.execution.remat) == (16, 2, True)
    rates = [
        learning_rate(run.optimizer, run.steps, step) for step in (run.optimizer.warmup, run.steps)
    ]
    np.testing.assert_allclose(rates, [5e-6, 5e-7], rtol=1e-6)
    assert not run.optimizer.muon_lr
    policy = setup.method.config
    assert policy.max_steps == PolicyConfig().steps(SEVEN_B.max_image_tokens) == 288
    assert (policy.decay, policy.length_weight, policy.policy_width) == (0.9, price, 1024)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The folder of a 7B model without weights, and data."""
    folder = tmp_path_factory.mktemp("world")
    testing.tiny_tokenizer().save_pretrained(folder / "model")
    crop = {"crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}}
    for name, value in {"config": MODELS["llava-7b"], "preprocessor_config": crop}.items():
        (folder / "model" / f"{name}.json").write_text(json.dumps(value))
    return folder / "model", write_data(folder / "data")


def scale_run(model, data, **changes):
    places = {
        "model.folder": str(model),
        "data.train_file": str(data / "train.json"),
        "data.image_folder": str(data / "images"),
    }
    return load_config("llava7b:gate").replace(places | changes)


@pytest.mark.slow
def test_the_7b_update_fits(world, tmp_path, capsys):
    """On eight devices of 16 GB that share the weights."""
    changes = {"mesh": "fsdp", "accelerator.count": 8, "accelerator.name": "tpu-v5e"}
    found = dry_run(scale_run(*world, **changes), tmp_path)
    weights = sum(2 * leaf.size for leaf in jax.tree.leaves(vlm.abstract_params(Llava(SEVEN_B))))
    assert weights / 8 <= found.weights < 1.01 * weights / 8
    assert found.weights < found.memory.arguments < found.memory.total
    assert found.memory.total < ACCELERATORS["tpu-v5e"].memory
    printed = capsys.readouterr().out
    for words in (
        "16 rows per update, 2 on each device; the frozen model takes 1 of them at a time",
        f"tpu-v5e: {ACCELERATORS['tpu-v5e'].memory / 2**30:.1f} GiB, fits",
        "hours for 39000 updates on 8 tpu-v5e, if they reach 40% of",
    ):
        assert words in printed
    assert not any((tmp_path / name).exists() for name in ("run.json", "checkpoints"))


def test_batches_are_what_was_planned(world, tmp_path):
    run, source = scale_run(*world), inspect_folder(world[0])
    setup = make_step_config(run, source.backbone)
    batches = open_batches(run, training_source(run.data, tmp_path), "identity", source)
    (bucket,) = batches.buckets
    abstract = dry_run_module.abstract_batch(setup, run.batch_size, bucket)
    found, planned = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch)
        for batch in (batches[0], abstract)
    )
    assert found == planned


def test_what_a_dry_run_lacks_is_named(world, tmp_path):
    def tried(**changes):
        return dry_run(scale_run(*world, **changes), tmp_path)

    with pytest.raises(ValueError, match=r"config.accelerator.count is 64, jax has 8 CPU devices"):
        tried(**{"accelerator.count": 64})
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llava-7b"]))
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        tried(**{"model.folder": str(tmp_path)})
