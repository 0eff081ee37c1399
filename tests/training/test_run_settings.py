"""What a run refuses before it loads anything, and the shipped configurations."""

import dataclasses
from pathlib import Path

import jax
import pytest
from tiny_run import ROOT, load_config, make_run, write_data

from stepprune_jax import configurations, testing
from stepprune_jax.data.source import training_source
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.training import DataSettings, rloo_run, run, train
from stepprune_jax.training.settings import make_mesh, make_step_config, read_method, split

MODEL = LlavaConfig.from_hf(testing.tiny_hf_config())


def build(run):
    return read_method(run, MODEL).config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data.missing": "replace"}, r"config\.data\.missing is 'replace', expected one of stop"),
        ({"optimizer.warmup": 6}, r"config\.optimizer\.warmup is 6"),
        ({"mesh": "data", "batch_size": 12}, r"config\.batch_size is 12"),
        ({"mesh": "fsdp=4,tensor=2", "batch_size": 24}, r"config\.model\.rows_at_once is 4"),
        ({"data.folder": ""}, r"config\.data\.folder is empty"),
    ],
)
def test_bad_fields_are_named_before_the_model_is_loaded(
    world, tmp_path, monkeypatch, change, message
):
    monkeypatch.setattr(run, "load_vlm", None)
    with pytest.raises(ValueError, match=message):
        train(make_run(*world, **change), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_missing_folders_and_bad_samples_are_named(world, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        train(make_run(tmp_path / "none", world[1]), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"config.data.folder: no folder .*data"):
        train(make_run(world[0], tmp_path / "data"), tmp_path / "run")
    data = write_data(tmp_path / "data", count=2, entries=[{"id": "x", "image": "0.png"}])
    with pytest.raises(ValueError, match=r'train\.json: sample 2: "conversations" is missing'):
        train(make_run(world[0], data), tmp_path / "run")
    with pytest.raises(ValueError, match=r"config.data.context_limit is 9"):
        train(make_run(*world, **{"data.context_limit": 9}), tmp_path / "run")


def test_the_training_file_may_lie_elsewhere(tmp_path):
    file = write_data(tmp_path / "data", count=1) / "train.json"
    data = DataSettings(train_file=str(file))
    with pytest.raises(ValueError, match=r"config.data.folder is empty"):
        training_source(data, tmp_path)  # where would its images be?
    data = dataclasses.replace(data, image_folder=str(tmp_path), linked_folders=("/",))
    found = training_source(data, tmp_path / "run")
    assert found == (file, tmp_path, (Path("/"),), tmp_path / "run", data)
    data = dataclasses.replace(data, index_folder=str(tmp_path / "indices"))
    assert training_source(data, tmp_path).index_folder == tmp_path / "indices"
    data = dataclasses.replace(data, train_file="", folder=str(tmp_path / "data"))
    assert training_source(data, tmp_path)[:2] == (file, tmp_path)
    data = dataclasses.replace(data, train_file="none.json")
    with pytest.raises(FileNotFoundError, match=r"config.data.train_file: no file none.json"):
        training_source(data, tmp_path)


def test_only_fields_that_change_what_is_learned_count():
    shapes = load_config("shapes")
    free = {"log_every": 1, "eval.batch_size": 2, "data.cache_gb": 0.5, "model.folder": "elsewhere"}
    assert shapes.replace(free | {"autoselect.width": 8}).changes(shapes.flat()) == []
    changed = shapes.replace({"policy.decay": 0.5, "batch_size": 8})
    assert changed.changes(shapes.flat()) == [
        "config.batch_size: 32 -> 8",
        "config.policy.decay: 0.9 -> 0.5",
    ]


def test_a_run_from_when_there_was_another_gate_is_resumed_with_the_one_that_is_left():
    run = load_config("shapes")
    assert run.changes(run.flat() | {"policy.gate": "vp"}) == []
    changes = run.changes(run.flat() | {"policy.gate": "scale"})
    assert changes == ["config.policy.gate: 'scale' -> None"]


def test_a_selector_may_be_blind_to_the_question():
    shapes = load_config("shapes").replace({"method": "autoselect"})
    blind = build(shapes.replace({"autoselect.text_width": 0}))
    assert blind.text_width == 0
    assert build(shapes) == dataclasses.replace(blind, text_width=MODEL.text.hidden_size)


def test_configurations_take_readings_and_ablations():
    both = build(load_config("llava7b:literal,last"))
    assert (both.stop, both.aggregation, both.policy_width) == ("softmax", "last", 1024)
    assert build(load_config("shapes:literal")).stop == "softmax"
    for name in ("shapes:loose", "llava7b:last,alive", "qwen25vl_3b:loose"):
        with pytest.raises(ValueError, match="expected literal"):
            load_config(name)


@pytest.mark.parametrize("gated", ["shapes", "llava7b:short"])
def test_sampled_sets_train_the_policy_of_a_run_through_the_gate(gated):
    run, before = load_config(f"rloo:{gated}"), load_config(gated)
    assert run.policy_gradient.samples == 8
    assert build(run) == dataclasses.replace(build(before), draw=1.0, length_weight=0.6)


def test_the_recipe_of_sampled_sets_changes_the_method_that_is_trained_and_no_other():
    run = load_config("shapes").replace({"method": "autoselect", "policy": PolicyConfig()})
    sampled = rloo_run(run.replace({"autoselect.width": 32, "autoselect.draw": 0.5}))
    assert sampled.optimizer.lr == pytest.approx(2e-3)  # of a width of 32, not of 1024
    assert sampled.policy == run.policy and sampled.autoselect.draw == 1.0
    # A resumed run may change the group of another method: no phase depends on it.
    wider = run.replace({"recipe": "sets", "policy.width": 16})
    assert not wider.changes(run.replace({"recipe": "sets"}).flat())
    (phase,), (other,) = split(run.replace({"recipe": "sets"})), split(wider)
    assert phase.run.optimizer == other.run.optimizer


def test_the_command_line_changes_fields():
    path = str(ROOT / "configs" / "shapes.py")
    texts = ["steps=60", "optimizer.lr=1", "eval.budgets=8,4", "policy.max_steps=72"]
    run = configurations.load(path, [*texts, "tensorboard=true", "eval.rows={'x': 'y'}"])
    assert (run.steps, run.eval.budgets, run.policy.max_steps) == (60, (8, 4), 72)
    assert run.optimizer.lr == 1 and type(run.optimizer.lr) is float  # one type, one program
    assert run.tensorboard is True and run.eval.rows == {"x": "y"}
    for text, folders in {"": (), "/a,b/c,": ("/a", "b/c"), "'a,b'": ("a,b",)}.items():
        run = configurations.load(path, ["eval.budgets=8,1/3", f"data.linked_folders={text}"])
        assert (run.eval.budgets, run.data.linked_folders) == ((8, "1/3"), folders)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.warmpu=1", r"config.optimizer.warmpu is not a field. Did you mean warmup\?$"),
        ("steps.x=1", r"config.steps.x is not a field$"),
        ("optimizer=3", r"config.optimizer is 3, expected OptimizerSettings"),
        ("steps", r"'steps' is no change of a field, expected FIELD=VALUE"),
        ("accelerator.utilisation=1.5", "config.accelerator.utilisation is 1.5, expected a share"),
    ],
)
def test_bad_changes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        configurations.load(str(ROOT / "configs" / "shapes.py"), [change])


@pytest.mark.parametrize(
    ("mesh", "rows", "expected"),
    [("single", 4, 4), ("single", 8, 0), ("data=2,tensor=4", 1, 2)],
)
def test_rows_at_once_are_those_of_each_device(mesh, rows, expected):
    tiny = make_run("", "", **{"mesh": mesh, "model.rows_at_once": rows})  # of 8
    assert make_step_config(tiny, Llava(MODEL), make_mesh(tiny)).forward.rows == expected


def test_several_processes_need_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"config.mesh is 'single', expected one for the 2 proc"):
        make_mesh(make_run("", ""))
