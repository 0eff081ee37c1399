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
from stepprune_jax.training.step_config import make_step_config

LLAVA_7B = LlavaConfig.from_hf(MODELS["llava-7b"])


@pytest.mark.parametrize(("reading", "price"), [("gate", 0.15), ("literal", 0.01)])
def test_the_papers_run_has_the_papers_values(reading, price):
    run = load_config(f"llava7b:{reading}")
    config = make_step_config(run, Llava(LLAVA_7B), build_mesh(run.mesh, jax.devices()[:2]))
    assert run.batch_size == 16
    assert (config.forward.rows, config.forward.execution.remat) == (2, True)
    rates = [
        learning_rate(run.optimizer, run.steps, step) for step in (run.optimizer.warmup, run.steps)
    ]
    np.testing.assert_allclose(rates, [5e-6, 5e-7], rtol=1e-6)
    assert not run.optimizer.muon_lr
    policy = config.selector.config
    assert policy.max_steps == PolicyConfig().steps(LLAVA_7B.max_image_tokens) == 288
    assert (policy.decay, policy.length_weight, policy.policy_width) == (0.9, price, 1024)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folder of a 7B model without weights, and folder of data."""
    folder = tmp_path_factory.mktemp("world")
    testing.tiny_tokenizer().save_pretrained(folder / "model")
    crop = {"crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}}
    for name, value in {"config": MODELS["llava-7b"], "preprocessor_config": crop}.items():
        (folder / "model" / f"{name}.json").write_text(json.dumps(value))
    return folder / "model", write_data(folder / "data")


def make_7b_run(model, data, **changes):
    paths = {
        "model.folder": str(model),
        "data.train_file": str(data / "train.json"),
        "data.image_folder": str(data / "images"),
    }
    return load_config("llava7b:gate").replace(paths | changes)


@pytest.mark.slow
def test_the_7b_update_fits_on_eight_devices_of_16_gb(world, tmp_path, capsys):
    changes = {"mesh": "fsdp", "accelerator.count": 8, "accelerator.name": "tpu-v5e"}
    cost = dry_run(make_7b_run(*world, **changes), tmp_path)
    leaves = jax.tree.leaves(vlm.abstract_params(Llava(LLAVA_7B)))
    device_bytes = sum(2 * leaf.size for leaf in leaves) / 8
    assert device_bytes <= cost.weights < 1.01 * device_bytes
    assert cost.weights < cost.memory.arguments < cost.memory.total
    assert cost.memory.total < ACCELERATORS["tpu-v5e"].memory
    output = capsys.readouterr().out
    for words in (
        "16 rows per update, 2 on each device; the frozen model takes 1 of them at a time",
        f"tpu-v5e: {ACCELERATORS['tpu-v5e'].memory / 2**30:.1f} GiB, fits",
        "hours for 39000 updates on 8 tpu-v5e, if they reach 40% of",
    ):
        assert words in output
    assert not any((tmp_path / name).exists() for name in ("run.json", "checkpoints"))


def test_batches_have_the_planned_shapes(world, tmp_path):
    run, source = make_7b_run(*world), inspect_folder(world[0])
    config = make_step_config(run, source.backbone)
    batches = open_batches(run, training_source(run.data, tmp_path), "identity", source)
    (bucket,) = batches.buckets
    abstract = dry_run_module.abstract_batch(config, run.batch_size, bucket)
    built_shapes, planned_shapes = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch)
        for batch in (batches[0], abstract)
    )
    assert built_shapes == planned_shapes


def test_a_dry_run_names_what_it_lacks(world, tmp_path):
    def plan(**changes):
        return dry_run(make_7b_run(*world, **changes), tmp_path)

    with pytest.raises(ValueError, match=r"config.accelerator.count is 64, jax has 8 CPU devices"):
        plan(**{"accelerator.count": 64})
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llava-7b"]))
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        plan(**{"model.folder": str(tmp_path)})
