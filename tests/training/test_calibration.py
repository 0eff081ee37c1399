"""Calibration of a trained policy's stop: a bias for each mean number of kept tokens."""

from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import VALIDATION_QUESTIONS, make_run, write_data

from stepprune_jax import load_policy, save_policy
from stepprune_jax.cli import calibrate
from stepprune_jax.training import train
from stepprune_jax.training.validation import read_calibration_questions

AUTOSELECT = str(Path(__file__).parents[2] / "experiments/policies/autoselect.safetensors")


@pytest.mark.slow
def test_training_and_the_command_calibrate_alike(world, tmp_path, capsys, caplog):
    model, data = world
    changes = {"steps": 3, "validation.calibrate": 4}
    with caplog.at_level("INFO"):
        train(make_run(model, data, **changes), tmp_path / "run")
    (line,) = [line for line in caplog.messages if line.startswith("the frozen model answers")]
    assert "of 5 validation questions" in line
    caplog.clear()
    path = tmp_path / "run" / "policy.safetensors"
    policy = load_policy(path)
    table = policy.calibration
    assert (table.questions, table.num_tokens) == (4, 9)
    assert 1 <= table.mean_count[0] <= table.mean_count[-1] <= 4
    uncalibrated = save_policy(policy.replace(calibration=None), tmp_path / "uncalibrated")
    arguments = ["--policy", uncalibrated, "--model", model, "--data", data]
    arguments += ["--out", tmp_path / "new", "--questions", 4, "--batch_size", 8]
    arguments = [*map(str, arguments), "--dtype", "float32"]
    calibrate.main(arguments)
    calibrated = load_policy(tmp_path / "new")
    assert calibrated.calibration == table
    jax.tree.map(np.testing.assert_array_equal, calibrated.params, policy.params)
    output = capsys.readouterr().out
    assert "4 questions, 9 visual tokens each" in output and output.rstrip().endswith("new")
    calibrate.main([*arguments, "--max_pixels", "256"])
    assert load_policy(tmp_path / "new").calibration.num_tokens == 4
    # A finished run is not calibrated again.
    content = path.read_bytes()
    train(make_run(model, data, **changes), tmp_path / "run")
    assert path.read_bytes() == content
    assert not any("frozen model" in line for line in caplog.messages)


def test_without_a_validation_split_there_are_no_calibration_questions(world, tmp_path):
    model, data = world
    run = make_run(model, data, **{"validation.calibrate": 2})
    texts = [question.text for question in read_calibration_questions(run)]
    assert texts == [VALIDATION_QUESTIONS[0], VALIDATION_QUESTIONS[2]]
    plain_run = make_run(model, write_data(tmp_path / "plain"), **{"validation.calibrate": 2})
    assert read_calibration_questions(plain_run) == []
    no_folder = make_run(model, data, **{"validation.folder": str(tmp_path / "none")})
    with pytest.raises(FileNotFoundError, match=r"config.validation.folder: no folder .*none"):
        read_calibration_questions(no_folder)
    (tmp_path / "plain" / "validation.jsonl").write_text("{")
    with pytest.raises(ValueError, match="calibrate=0 skips the file"):
        read_calibration_questions(plain_run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--policy": AUTOSELECT}, "autoselect has no learned stop to calibrate"),
        ({"--policy": "absent"}, "nor a shipped policy of that name (shapes, shapes_qwen"),
        ({"--data": "absent"}, "absent"),
        ({"--out": "."}, "--out is '.', expected a file that can be created or written to"),
    ],
)
def test_bad_arguments_of_the_command_are_named(tmp_path, changes, message):
    arguments = {"--policy": "shapes", "--model": "shapes", "--data": str(tmp_path)}
    arguments |= {"--out": str(tmp_path / "new")} | changes
    with pytest.raises((ValueError, OSError)) as error:
        calibrate.main([part for pair in arguments.items() for part in pair])
    assert message in str(error.value)
