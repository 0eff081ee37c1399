"""Export of a run's policy: one file and a model card."""

import contextlib
import json
import shutil

import jax
import numpy as np
import pytest
from commands import status
from tiny_run import metrics

from stepprune_jax import PolicyConfig, load_policy
from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.policy import read_about
from stepprune_jax.cli import export
from stepprune_jax.evaluation.settings import DEFAULT, EvalSettings, read_policies
from stepprune_jax.training import Run
from stepprune_jax.workdir.checkpoints import Checkpoints


def assert_equal(tree, expected):
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def read_run_file(workdir):
    return json.loads((workdir / "run.json").read_text())


@pytest.mark.slow
def test_the_exported_policy_equals_the_policy_of_the_run(finished_run, tmp_path, capsys):
    export.main([str(finished_run), "--out", str(tmp_path / "release"), "--stop_bias=-0.5"])
    path = tmp_path / "release" / "policy.safetensors"
    run_path = finished_run / "policy.safetensors"
    assert capsys.readouterr().out.split() == [str(path), str(path.with_name("README.md"))]
    policy, run_policy = load_policy(path), load_policy(run_path)
    assert read_about(path)["model"] == read_about(run_path)["model"]
    assert_equal((policy.params, policy.stats), (run_policy.params, run_policy.stats))
    assert policy.config == run_policy.config and policy.stop_bias == -0.5
    about = json.loads(safetensors.read_contents(path)[1]["about"])
    assert about == {"step": 6, **read_run_file(finished_run)}
    assert read_policies(EvalSettings(), tmp_path, path)[DEFAULT].stop_bias == -0.5


@pytest.mark.slow
def test_the_model_card_describes_the_training(world, finished_run, tmp_path):
    export.export(finished_run, tmp_path)
    card = (tmp_path / "README.md").read_text()
    about = read_run_file(finished_run)
    last_row = metrics(finished_run)[-1]
    for words in (
        f"| frozen model | `{world[0]}`",
        about["model"],
        about["data"],
        "| updates | 6 of 6, each of 8 conversations |",
        f" loss {last_row['loss']:.4g}, ",
        '"policy.width": 8',
    ):
        assert words in card
    assert card.startswith("---\n") and "base_model" not in card and "$" not in card
    assert "Recipe `gate`:" in card and "- updates 1 to 6: " in card
    policy = load_policy(tmp_path / "policy.safetensors")
    hub_config = about["config"] | {"model.folder": "llava-hf/llava-1.5-7b-hf"}
    hub_card = export.model_card(policy, {"step": 1, **about, "config": hub_config}, {})
    assert "\nbase_model: llava-hf/llava-1.5-7b-hf\n" in hub_card


def test_the_model_card_states_the_values_of_the_recipe_that_auto_chose():
    run = Run(recipe="auto", steps=500, policy=PolicyConfig(width=32, num_heads=4))
    config = json.loads(json.dumps(run.flat()))
    text = export._describe_recipe(config, "warm_start")
    first, _, *phases = text.splitlines()
    assert first == "Recipe `auto`, which chose `warm_start` by its trial:"
    # The learning rate is 1e-3 * 64 / 32, and falls to a tenth.
    assert phases[0].startswith("- updates 1 to 200: the warm start; AdamW 0.002 to 0.0002, ")
    assert phases[1].startswith("- updates 201 to 500: RLOO on sampled subsets; AdamW 0.002 to")
    assert "temperature 1.0" in phases[1] and "length_weight" in phases[1]
    assert "which chose `gate`" in export._describe_recipe(config, "gate")
    assert export._describe_recipe({"recipe": "other"}, None).startswith("Recipe `other`; the")


@pytest.mark.slow
def test_an_unfinished_run_exports_its_latest_undamaged_checkpoint(finished_run, tmp_path, capsys):
    workdir = shutil.copytree(finished_run, tmp_path / "run")
    (workdir / "policy.safetensors").unlink()
    temporary = workdir / "checkpoints" / "7.orbax-checkpoint-tmp"
    shutil.copytree(workdir / "checkpoints" / "4", temporary)
    files = sorted(workdir.rglob("*"))
    policy = load_policy(export.export(workdir, tmp_path / "a"))
    assert_equal(policy.params, load_policy(finished_run / "policy.safetensors").params)
    assert sorted(workdir.rglob("*")) == files  # the unfinished checkpoint stays
    (workdir / "checkpoints" / "6" / "beside" / "metadata").write_text("{")
    path = export.export(workdir, tmp_path / "b")
    assert json.loads(safetensors.read_contents(path)[1]["about"])["step"] == 4
    assert "checkpoint 6 of" in capsys.readouterr().err
    assert "after update 4:" in (tmp_path / "b" / "README.md").read_text()


def error_of(capsys, *arguments):
    """Returns the one-line error of the command."""
    assert status("stepprune-export", export.main, *arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("stepprune-export: error: ") and message.count("\n") == 1
    return message


@pytest.mark.slow
def test_a_folder_that_cannot_be_exported_is_refused_in_one_line(finished_run, tmp_path, capsys):
    assert "has no checkpoints/" in error_of(capsys, tmp_path, "--out", tmp_path / "a")
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoint yet" in error_of(capsys, tmp_path, "--out", tmp_path / "a")
    with contextlib.closing(Checkpoints(tmp_path, 1)) as checkpoints:
        checkpoints.save(3, {"x": np.ones(3)})
    assert "no checkpoints of a policy" in error_of(capsys, tmp_path, "--out", tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "README.md").write_text("a file of the user")
    assert "README.md exists" in error_of(capsys, finished_run, "--out", tmp_path)
    assert (tmp_path / "README.md").read_text() == "a file of the user"
    assert "--out" in error_of(capsys, finished_run)
