"""Runs and settings from when RLOO was called "sets", and its group `policy_gradient`."""

import json

import pytest
from tiny_run import load_config, make_run, metrics, read_run_file, train_to_line

from stepprune_jax import configurations
from stepprune_jax.training import train

RLOO_CHANGES = {"rloo.longest": 0.5, "optimizer.warmup": 0}


def with_former_names(run, recipe, samples):
    """Returns the settings under the names of earlier versions.

    `recipe` or a number of `samples` chose RLOO.
    """
    old = run.flat()
    group = {name: old.pop(name) for name in [*old] if name.startswith("rloo.")}
    for name in ("longest", "stops", "positions"):
        old[f"policy_gradient.{name}"] = group[f"rloo.{name}"]
    old |= {"recipe": recipe, "policy_gradient.samples": samples}
    if samples:
        rloo = run.resolve_rloo()
        for name in ("lr", "final_lr", "muon_lr"):
            old[f"optimizer.{name}"] = getattr(rloo, name)
        old |= {"policy.draw": rloo.temperature, "policy.length_weight": rloo.length_weight}
    return old


@pytest.mark.parametrize(
    ("recipe", "former_recipe", "samples"),
    [
        ("gate", None, 0),
        ("gate", "gate", 0),
        ("auto", "auto", 0),
        ("rloo", "sets", 0),
        ("rloo", "sets", 8),
        ("rloo", None, 8),
    ],
)
def test_saved_settings_with_former_names_equal_todays(recipe, former_recipe, samples):
    run = load_config("shapes").replace({"recipe": recipe, "rloo.longest": 0.2})
    old = with_former_names(run, former_recipe, samples)
    assert run.changes(old) == []
    if recipe == "gate":
        return  # the gate does not read the group
    changed = run.replace({"rloo.longest": 0.3})
    assert changed.changes(old) == ["config.rloo.longest: 0.2 -> 0.3"]


def test_settings_of_another_recipe_or_with_an_annealed_gate_are_refused():
    run = load_config("rloo:shapes")
    gate_settings = with_former_names(run, None, 0)
    assert "config.recipe: 'gate' -> 'rloo'" in run.changes(gate_settings)
    annealed = with_former_names(run, None, 8) | {"text_gate_anneal": 0.5}
    assert run.changes(annealed) == ["config.text_gate_anneal: RLOO now keeps the text gate open"]
    other_rate = with_former_names(run, None, 8) | {"optimizer.lr": 0.5}
    assert run.changes(other_rate) == ["config.rloo.lr: 0.5 -> 0.001"]


def test_a_folder_with_former_names_resumes_bit_for_bit(world, tmp_path, monkeypatch):
    run = make_run(*world, recipe="rloo", steps=4, **RLOO_CHANGES)
    train(run, tmp_path / "uninterrupted")
    train_to_line(monkeypatch, 2, run, tmp_path / "resumed")
    about = read_run_file(tmp_path / "resumed") | {"config": with_former_names(run, "sets", 0)}
    (tmp_path / "resumed" / "run.json").write_text(json.dumps(about))
    train(run, tmp_path / "resumed")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy_gradient.samples=4", r"config\.policy_gradient\.samples is now config\.rloo\.sam"),
        ("recipe=sets", r"config\.recipe is 'sets', expected one of gate, rloo \(formerly sets\)"),
        ("optimizer.lr=1e-3", r"config\.optimizer\.lr has no effect .*: set config\.rloo\.lr$"),
        (
            "policy.draw=0.5",
            r"config\.policy\.draw has no effect .*: set config\.rloo\.temperature",
        ),
    ],
)
def test_former_names_of_flags_are_refused_with_todays(change, message):
    with pytest.raises(ValueError, match=message):
        configurations.load("rloo:shapes", [change])


def test_a_configuration_with_the_former_function_is_refused_with_todays(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from stepprune_jax.training import Run, sampled_sets\n")
    with pytest.raises(ValueError, match=r"sampled_sets\(run\) is now run\.replace\(.*rloo"):
        configurations.load(str(file))
