"""The second level of the world, from its first scene to the comparison, at no width."""

import pathlib

import pytest

from experiments.pretrain.run import pretrain
from experiments.shapes import write_world
from experiments.studies.sequence import compare
from stepprune_jax import configurations
from stepprune_jax.evaluate import evaluate
from stepprune_jax.training import train

CONFIGS = pathlib.Path(__file__).parents[2] / "experiments" / "configs"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph")
def test_from_scenes_to_the_comparison(tmp_path):
    small = {f"model.{part}_{size}": 16 for part in ("vision", "text") for size in ("width", "mlp")}
    small |= {"model.vision_layers": 1, "model.vision_heads": 2, "model.text_layers": 2}
    small |= {"model.text_heads": 2, "model.image_size": 32, "model.patch_size": 2}
    small |= {f"{stage}.batch_size": 2 for stage in ("tower", "language", "noise")}
    small |= {"tower.steps": 1, "language.steps": 2, "noise.steps": 2, "language.whole_steps": 1}
    small |= {"language.kept": (4,), "micro_batch": 2, "cpu_devices": 0}
    run = configurations.load(str(CONFIGS / "pretrain_shapes_hard.py")).replace(small)
    world = {"level": 2, "side": 32}
    data = write_world(
        tmp_path / "first", seed=1, train=4, validation=0, test=0, patches=True, **world
    )
    model = pretrain(run, tmp_path / "pretrain", data)

    second = write_world(tmp_path / "second", seed=0, train=2, validation=1, test=2, **world)
    small = {"policy.width": 4, "policy.num_heads": 1, "policy.mlp_ratio": 1}
    small |= {"policy.encoder_layers": 1, "steps": 2, "log_every": 2, "batch_size": 2}
    small |= {"model.rows_at_once": 2, "optimizer.warmup": 0, "validation.calibrate": 0}
    small |= {"data.folder": str(second), "data.stats_images": 1, "model.folder": str(model)}
    small |= {"mesh": "single", "cpu_devices": 0, "eval.budgets": (4, 2), "eval.batch_size": 4}
    small |= {"eval.validation_questions": 4, "eval.methods": "all,stepprune"}
    run = configurations.load(str(CONFIGS / "shapes_hard.py")).replace(small)
    workdir = tmp_path / "run"
    train(run, workdir)
    evaluate(run, workdir, stages=("generate", "score"))
    assert "StepPrune,exact,99.2," in (workdir / "report" / "table.csv").read_text()
    result = compare(run, workdir)
    assert result["questions"]["all"] == 16 and result["entropy"]["all"] > 0
    oracle = [
        row
        for row in result["choices"]
        if (row["method"], row["budget"], row["family"]) == ("oracle", 4, "all")
    ]
    assert oracle[0]["relevant"] > 50 and oracle[0]["looks"] >= 1
