"""A run's policy leaves it as one file with a model card, and is what the programs take."""

import contextlib
import json
import shutil

import jax
import numpy as np
import pytest
from commands import status
from tiny_run import metrics

from stepprune_jax import load_policy
from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.policy import read_about
from stepprune_jax.cli import export
from stepprune_jax.evaluation.settings import DEFAULT, EvalSettings, read_policies
from stepprune_jax.workdir.checkpoints import Checkpoints


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_the_exported_policy_is_the_run_s_own(world, whole, tmp_path, capsys):
    export.main([str(whole), "--out", str(tmp_path / "release"), "--stop_bias=-0.5"])
    path = tmp_path / "release" / "policy.safetensors"
    assert capsys.readouterr().out.split() == [str(path), str(path.with_name("README.md"))]
    found, own = load_policy(path), load_policy(whole / "policy.safetensors")
    assert read_about(path)["model"] == read_about(whole / "policy.safetensors")["model"]
    equal((found.params, found.stats), (own.params, own.stats))
    assert found.config == own.config and found.stop_bias == -0.5
    about = json.loads(safetensors.read_contents(path)[1]["about"])
    described = json.loads((whole / "run.json").read_text())
    assert about == {"step": 6, **described}
    assert read_policies(EvalSettings(), tmp_path, path)[DEFAULT].stop_bias == -0.5


@pytest.mark.slow
def test_the_card_says_what_the_policy_was_trained_on(world, whole, tmp_path):
    export.export(whole, tmp_path)
    card = (tmp_path / "README.md").read_text()
    described = json.loads((whole / "run.json").read_text())
    last = metrics(whole)[-1]
    for said in (
        f"| frozen model | `{world[0]}`",
        described["model"],
        described["data"],
        "| updates | 6 of 6, each of 8 conversations |",
        f" loss {last['loss']:.4g}, ",
        '"policy.width": 8',
    ):
        assert said in card
    assert card.startswith("---\n") and "base_model" not in card and "$" not in card
    policy = load_policy(tmp_path / "policy.safetensors")
    trained = {"step": 1, **described} | {
        "config": described["config"] | {"model.folder": "llava-hf/llava-1.5-7b-hf"}
    }
    assert "\nbase_model: llava-hf/llava-1.5-7b-hf\n" in export.model_card(policy, trained, {})


@pytest.mark.slow
def test_an_unfinished_run_gives_its_latest_whole_checkpoint(whole, tmp_path, capsys):
    workdir = shutil.copytree(whole, tmp_path / "run")
    (workdir / "policy.safetensors").unlink()
    torn = workdir / "checkpoints" / "7.orbax-checkpoint-tmp"
    shutil.copytree(workdir / "checkpoints" / "4", torn)
    before = sorted(workdir.rglob("*"))
    policy = load_policy(export.export(workdir, tmp_path / "a"))
    equal(policy.params, load_policy(whole / "policy.safetensors").params)
    assert sorted(workdir.rglob("*")) == before  # what is being written is left alone
    (workdir / "checkpoints" / "6" / "beside" / "metadata").write_text("{")
    path = export.export(workdir, tmp_path / "b")
    assert json.loads(safetensors.read_contents(path)[1]["about"])["step"] == 4
    assert "checkpoint 6 of" in capsys.readouterr().err
    assert "after update 4:" in (tmp_path / "b" / "README.md").read_text()


def error_of(capsys, *arguments):
    assert status("stepprune-export", export.main, *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("stepprune-export: error: ") and said.count("\n") == 1
    return said


@pytest.mark.slow
def test_what_cannot_be_exported_is_told_in_one_line(whole, tmp_path, capsys):
    assert "has no checkpoints/" in error_of(capsys, tmp_path, "--out", tmp_path / "a")
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoint yet" in error_of(capsys, tmp_path, "--out", tmp_path / "a")
    with contextlib.closing(Checkpoints(tmp_path, 1)) as checkpoints:
        checkpoints.save(3, {"x": np.ones(3)})
    assert "no checkpoints of a policy" in error_of(capsys, tmp_path, "--out", tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "README.md").write_text("mine")
    assert "README.md exists" in error_of(capsys, whole, "--out", tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert "--out" in error_of(capsys, whole)
