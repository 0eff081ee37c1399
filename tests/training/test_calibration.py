"""A trained policy knows which stop bias keeps how many tokens on average."""

from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import ASKED, make_run, write_data

from stepprune_jax import load_policy, save_policy
from stepprune_jax.cli import calibrate
from stepprune_jax.training import train
from stepprune_jax.training.questions import read_calibration_questions

AUTOSELECT = str(Path(__file__).parents[2] / "experiments/policies/autoselect.safetensors")


@pytest.mark.slow
def test_the_end_of_training_and_the_command_measure_the_same(world, tmp_path, capsys):
    model, data = world
    changes = {"steps": 3, "validation.calibrate": 4}
    train(make_run(model, data, **changes), tmp_path / "run")
    path = tmp_path / "run" / "policy.safetensors"
    policy = load_policy(path)
    table = policy.calibration
    assert (table.questions, table.num_tokens) == (4, 9)
    assert 1 <= table.mean_count[0] <= table.mean_count[-1] <= 4
    bare = save_policy(policy.replace(calibration=None), tmp_path / "bare")
    arguments = ["--policy", bare, "--model", model, "--data", data, "--out", tmp_path / "new"]
    more = ["--questions", "4", "--batch_size", "8", "--dtype", "float32"]
    calibrate.main([*map(str, arguments), *more])
    found = load_policy(tmp_path / "new")
    assert found.calibration == table
    jax.tree.map(np.testing.assert_array_equal, found.params, policy.params)
    out = capsys.readouterr().out
    assert "4 questions, 9 visual tokens each" in out and out.rstrip().endswith("new")
    calibrate.main([*map(str, arguments), *more, "--max_pixels", "256"])
    assert load_policy(tmp_path / "new").calibration.num_tokens == 4
    # A finished run is not calibrated again.
    before = path.read_bytes()
    train(make_run(model, data, **changes), tmp_path / "run")
    assert path.read_bytes() == before


def test_without_a_validation_split_there_is_no_calibration(world, tmp_path):
    model, data = world
    run = make_run(model, data, **{"validation.calibrate": 2})
    asked = read_calibration_questions(run)
    assert [question.text for question in asked] == [ASKED[0], ASKED[2]]
    plain = make_run(model, write_data(tmp_path / "plain"), **{"validation.calibrate": 2})
    assert read_calibration_questions(plain) == []
    elsewhere = make_run(model, data, **{"validation.folder": str(tmp_path / "none")})
    with pytest.raises(FileNotFoundError, match=r"config.validation.folder: no folder .*none"):
        read_calibration_questions(elsewhere)
    (tmp_path / "plain" / "validation.jsonl").write_text("{")
    with pytest.raises(ValueError, match="calibrate=0 skips the file"):
        read_calibration_questions(plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--policy": AUTOSELECT}, "autoselect has no learned stop to calibrate"),
        ({"--policy": "absent"}, "nor a shipped policy of that name (shapes, shapes_qwen"),
        ({"--data": "absent"}, "absent"),
        ({"--out": "."}, "--out is '.', expected a file that can be created or written to"),
    ],
)
def test_mistakes_are_user_errors(tmp_path, changes, message):
    given = {"--policy": "shapes", "--model": "shapes", "--data": str(tmp_path)}
    given |= {"--out": str(tmp_path / "new")} | changes
    with pytest.raises((ValueError, OSError)) as refusal:
        calibrate.main([part for pair in given.items() for part in pair])
    assert message in str(refusal.value)
