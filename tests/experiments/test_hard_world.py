"""The second level of the world, from its first scene to the comparison, at no width."""

import pathlib

import pytest

from experiments.pretrain.run import pretrain
from experiments.pretrain.settings import read_pretraining
from experiments.shapes import write_world
from experiments.studies.sequence import compare
from stepprune_jax.configurations import load_config
from stepprune_jax.evaluate import evaluate
from stepprune_jax.evaluation.settings import read_evaluation
from stepprune_jax.training import read_run, train

CONFIGS = pathlib.Path(__file__).parents[2] / "experiments" / "configs"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph")
def test_from_scenes_to_the_comparison(tmp_path):
    config = load_config(str(CONFIGS / "pretrain_shapes_hard.py"))
    config.micro_batch, config.cpu_devices = 2, 0
    config.model.image_size, config.model.patch_size = 32, 2
    small = {f"{part}_{size}": 16 for part in ("vision", "text") for size in ("width", "mlp")}
    config.model.update({**small, "vision_layers": 1, "vision_heads": 2})
    config.model.update({"text_layers": 2, "text_heads": 2})
    for stage, steps in (("tower", 1), ("language", 2), ("noise", 2)):
        config[stage].steps, config[stage].batch_size = steps, 2
    config.language.whole_steps, config.language.kept = 1, (4,)
    run = read_pretraining(config)
    world = {"level": 2, "side": 32}
    data = write_world(
        tmp_path / "first", seed=1, train=4, validation=0, test=0, patches=True, **world
    )
    model = pretrain(run, tmp_path / "pretrain", data)

    config = load_config(str(CONFIGS / "shapes_hard.py"))
    config.model.folder, config.mesh, config.cpu_devices = str(model), "single", 0
    second = write_world(tmp_path / "second", seed=0, train=2, validation=1, test=2, **world)
    config.data.folder = str(second)
    config.data.stats_images = 1
    config.policy.update({"width": 4, "num_heads": 1, "mlp_ratio": 1, "encoder_layers": 1})
    config.steps = config.log_every = 2
    config.batch_size = config.model.rows_at_once = 2
    config.optimizer.warmup, config.validation.calibrate = 0, 0
    config.eval.update({"budgets": (4, 2), "batch_size": 4, "validation_questions": 4})
    config.eval.methods = "all,stepprune"
    workdir = tmp_path / "run"
    train(read_run(config), workdir)
    evaluate(read_evaluation(config), workdir, stages=("generate", "score"))
    assert "StepPrune,exact,99.2," in (workdir / "report" / "table.csv").read_text()
    result = compare(read_evaluation(config), workdir)
    assert result["questions"]["all"] == 16 and result["entropy"]["all"] > 0
    oracle = [
        row
        for row in result["choices"]
        if (row["method"], row["budget"], row["family"]) == ("oracle", 4, "all")
    ]
    assert oracle[0]["relevant"] > 50 and oracle[0]["looks"] >= 1
