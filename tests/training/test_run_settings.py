"""Settings that a run refuses before it loads anything, and the shipped configurations."""

import dataclasses
import re
from pathlib import Path

import jax
import pytest
from tiny_run import ROOT, load_config, make_run, write_data

from stepprune_jax import configurations, testing
from stepprune_jax.data.source import training_source
from stepprune_jax.models.llava import Llava, LlavaConfig
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.selectors.diagnosis import CONFIG_REMEDIES
from stepprune_jax.training import DataSettings, RlooTraining, Run, run, train
from stepprune_jax.training.step_config import make_mesh, make_selector, make_step_config

MODEL = LlavaConfig.from_hf(testing.tiny_hf_config())


def config_of(run):
    """Returns the configuration of a run's selector in front of the tiny model."""
    return make_selector(run, MODEL).config


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


def test_the_training_file_may_be_outside_the_data_folder(tmp_path):
    file = write_data(tmp_path / "data", count=1) / "train.json"
    data = DataSettings(train_file=str(file))
    with pytest.raises(ValueError, match=r"config.data.folder is empty"):
        training_source(data, tmp_path)  # no folder says where the images are
    data = dataclasses.replace(data, image_folder=str(tmp_path), linked_folders=("/",))
    source = training_source(data, tmp_path / "run")
    assert source == (file, tmp_path, (Path("/"),), tmp_path / "run", data, None)
    data = dataclasses.replace(data, index_folder=str(tmp_path / "indices"))
    assert training_source(data, tmp_path).index_folder == tmp_path / "indices"
    data = dataclasses.replace(data, train_file="", folder=str(tmp_path / "data"))
    assert training_source(data, tmp_path)[:2] == (file, tmp_path)
    data = dataclasses.replace(data, train_file="none.json")
    with pytest.raises(FileNotFoundError, match=r"config.data.train_file: no file none.json"):
        training_source(data, tmp_path)


def test_only_fields_that_change_what_is_learned_differ():
    shapes = load_config("shapes")
    free = {"log_every": 1, "eval.batch_size": 2, "data.cache_gb": 0.5, "model.folder": "elsewhere"}
    other_groups = {"autoselect.width": 8, "rloo.samples": 4}
    assert shapes.replace(free | other_groups).changes(shapes.flat()) == []
    changed = shapes.replace({"policy.decay": 0.5, "batch_size": 8})
    assert changed.changes(shapes.flat()) == [
        "config.batch_size: 32 -> 8",
        "config.policy.decay: 0.9 -> 0.5",
    ]


def test_a_run_with_the_former_choice_of_gate_resumes_with_the_only_gate():
    run = load_config("shapes")
    assert run.changes(run.flat() | {"policy.gate": "vp"}) == []
    changes = run.changes(run.flat() | {"policy.gate": "scale"})
    assert changes == ["config.policy.gate: 'scale' -> None"]


def test_a_selector_may_ignore_the_question():
    shapes = load_config("shapes").replace({"method": "autoselect"})
    config = config_of(shapes.replace({"autoselect.text_width": 0}))
    assert config.text_width == 0
    expected = dataclasses.replace(config, text_width=MODEL.text.hidden_size)
    assert config_of(shapes) == expected


def test_configurations_take_readings_and_ablations():
    config = config_of(load_config("llava7b:literal,last"))
    assert (config.stop, config.aggregation, config.policy_width) == ("softmax", "last", 1024)
    assert config_of(load_config("shapes:literal")).stop == "softmax"
    for name in ("shapes:loose", "llava7b:last,alive", "qwen25vl_3b:loose"):
        with pytest.raises(ValueError, match="expected literal"):
            load_config(name)


@pytest.mark.parametrize("name", ["shapes", "llava7b:short"])
def test_rloo_configures_the_selector_with_its_temperature_and_price(name):
    run, gate_run = load_config(f"rloo:{name}"), load_config(name)
    config = make_step_config(run, Llava(MODEL), make_mesh(run, jax.devices()[:2]))
    expected = dataclasses.replace(config_of(gate_run), draw=1.0, length_weight=0.6)
    assert config.selector.config == expected
    assert config_of(run) == config_of(gate_run)


def test_rloo_takes_its_learning_rate_from_the_method_that_is_trained():
    changes = {"recipe": "rloo", "method": "autoselect", "policy": PolicyConfig()}
    run = load_config("shapes").replace(changes | {"autoselect.width": 32})
    (phase,) = run.make_recipe().phases(run.steps)
    assert phase.optimizer.lr == pytest.approx(2e-3)  # for a width of 32, not of 1024
    # A resumed run may change the group of another method, because no phase depends on it.
    wider = run.replace({"policy.width": 16})
    assert not wider.changes(run.flat())
    (wider_phase,) = wider.make_recipe().phases(run.steps)
    assert wider_phase == phase


def test_a_bad_setting_of_rloo_is_named_as_a_field_of_the_configuration():
    with pytest.raises(ValueError, match=r"^config.rloo.longest is 4.*, expected a share in"):
        RlooTraining(longest=4.0)


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
        (
            "optimizer.warmpu=1",
            r"config.optimizer.warmpu is not a field. Did you mean config.optimizer.warmup\?$",
        ),
        (
            "learning_rate=1e-3",
            r"config.learning_rate is not a field. "
            r"Did you mean config.optimizer.lr or config.rloo.lr or config.warm_start.lr\?$",
        ),
        ("optimizer.learning_rate=1", r"Did you mean config.optimizer.lr\?$"),
        ("epochs=3", r"Did you mean config.steps\?$"),
        ("bathc_size=3", r"Did you mean config.batch_size\?$"),
        ("colour=red", r"config.colour is not a field.$"),
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
    ("mesh", "rows", "expected"), [("single", 4, 4), ("single", 8, 0), ("data=2,tensor=4", 1, 2)]
)
def test_rows_at_once_counts_the_rows_of_each_device(mesh, rows, expected):
    run = make_run("", "", **{"mesh": mesh, "model.rows_at_once": rows})  # a batch has 8 rows
    assert make_step_config(run, Llava(MODEL), make_mesh(run)).forward.rows == expected


def test_several_processes_need_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"config.mesh is 'single', expected one for the 2 proc"):
        make_mesh(make_run("", ""))


def test_remedies_of_a_diagnosis_name_fields_that_exist():
    fields = Run().flat()
    names = re.findall(r"\bconfig\.([a-z_.]*[a-z_])", " ".join(CONFIG_REMEDIES))
    assert names and {*names} <= {*fields}
