import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from small_world import one_shot, stepprune, tiny_model, write_split

from experiments.studies import seeds
from experiments.studies.processes import Job, run_jobs
from experiments.studies.variants import TRIALS, variant_configs
from stepprune_jax import configurations
from stepprune_jax.checkpoints.policy import save_policy

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "shapes.py")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    tiny_model(root / "model")
    for seed, name in enumerate(("test", "validation")):
        write_split(root / "data", name, 2, seed)
    (root / "data" / "train.json").write_text("[]")
    return root


@pytest.fixture
def trained(monkeypatch):
    """Stands in for training: writes a policy at once, and notes which runs there were."""
    calls = []

    def train(config, folder):
        calls.append(folder.name)
        one = config.method == "autoselect"
        save_policy((one_shot if one else stepprune)(config.seed), folder / "policy.safetensors")

    monkeypatch.setattr(seeds.training, "train", train)
    return calls


def changes(world):
    return [
        f"model.folder={world / 'model'}",
        f"data.folder={world / 'data'}",
        "eval.budgets=[4, 2]",
        "eval.batch_size=4",
        "eval.methods=all,random",
        "steps=100",
    ]


@pytest.mark.slow
def test_every_row_is_trained_on_every_seed_and_evaluated_once(world, trained, tmp_path, capsys):
    rows, at = ["default", "autoselect"], tmp_path / "runs"
    found = seeds.run_seeds(CONFIG, at, [0, 1], rows, changes=changes(world))
    assert trained == ["default-0", "autoselect-0", "default-1", "autoselect-1"]
    table = {(r["method"], r["mode"], r["pruning_rate"]): r for r in found["rows"]}
    assert table["StepPrune", "exact", 55.6]["seeds"] == 2
    assert table["StepPrune", "adaptive", 77.8]["accuracy_std"] is not None
    assert table["AutoSelect-like", "exact", 77.8]["seeds"] == 2
    assert table["all tokens", "exact", 0.0]["seeds"] == 1
    assert json.loads((at / "report" / "seeds.json").read_text()) == found
    shown = (at / "report" / "seeds.md").read_text()
    assert "| method | mode | runs | 4 | 2 |" in shown and "| StepPrune | adaptive | 2 |" in shown
    # All is there: neither trained nor evaluated again, not even the model is loaded.
    capsys.readouterr()
    again = seeds.run_seeds(CONFIG, at, [0, 1], rows, changes=changes(world))
    assert again == found and len(trained) == 4 and "evaluating" not in capsys.readouterr().out
    # A policy that changed is evaluated again, and that one alone.
    save_policy(stepprune(9), at / "default-1" / "policy.safetensors")
    seeds.run_seeds(CONFIG, at, [0, 1], rows, changes=changes(world))
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluating" in line]
    assert lines == ["evaluating StepPrune, seed 1"]
    # The learned stop of a trial, and of an ablation of the stop, is evaluated, too.
    for row, label in (
        ("default+slow", "StepPrune, learning rates x 1/2"),
        ("aligned_stop", "stop as a slot"),
    ):
        other = seeds.run_seeds(CONFIG, at, [0], [row], changes=changes(world))
        modes = {(r["method"], r["mode"]) for r in other["rows"]}
        assert modes >= {(label, "exact"), (label, "adaptive"), (f"{label}, own stop", "adaptive")}
    # A run with other settings is not taken for this one.
    with pytest.raises(ValueError, match=r"folder of another run(.|\n)*config.steps: 100 -> 200"):
        seeds.run_seeds(CONFIG, at, [0], rows, changes=[*changes(world), "steps=200"])


def test_an_interrupted_run_is_reported(world, monkeypatch, tmp_path):
    monkeypatch.setattr(seeds.training, "train", lambda config, folder: None)
    with pytest.raises(ValueError, match=r"default-3 holds no policy.*was interrupted"):
        seeds.run_seeds(CONFIG, tmp_path, [3], ["default"], changes=changes(world))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": ["default", "best"]}, r"--rows is \['default', 'best'\], expected distinct"),
        ({"seeds": [1, 1]}, r"--seeds is \[1, 1\], expected distinct"),
        ({"processes": 0}, "--processes is 0"),
        ({"changes": ["colour=3"]}, "config.colour is not a field"),
    ],
)
def test_bad_arguments_are_named(world, tmp_path, arguments, message):
    more = arguments.pop("changes", [])
    given = {"seeds": [0], "rows": ["default"]} | arguments
    with pytest.raises(ValueError, match=message):
        seeds.run_seeds(CONFIG, tmp_path, **given, changes=[*changes(world), *more])


def changes_between(one, other):
    """The fields in which two configurations differ."""
    old, new = one.flat(), other.flat()
    return {name: new[name] for name in new if old[name] != new[name]}


def test_configurations_of_rows():
    rows = variant_configs(CONFIG, ["default", "literal", "autoselect", "causal", "last"], [])
    by_key = {row.key: row.config for row in rows}
    assert by_key["literal"].policy.stop == "softmax"
    assert by_key["autoselect"].method == "autoselect"
    assert by_key["causal"].policy.encoder_attention == "causal"
    assert by_key["last"].policy.aggregation == "last"
    for row in ("default", "autoselect", "literal"):
        tried = variant_configs(CONFIG, [f"{row}+{trial}" for trial in TRIALS], [])
        changed = [changes_between(by_key[row], trial.config) for trial in tried]
        assert all(changed) and len({*map(str, changed)}) == len(TRIALS)
    fast, base = variant_configs(CONFIG, ["literal+fast"], [])[0], by_key["literal"].optimizer
    assert fast.config.optimizer.lr == 2 * base.lr and fast.config.optimizer.muon_lr == 0
    assert fast.method == "StepPrune literal, learning rates x 2"
    with pytest.raises(FileNotFoundError, match=r"no configuration file absent\.py"):
        configurations.load("absent.py:literal")


def job(folder, name, code):
    return Job(name, [sys.executable, "-c", code], folder / f"{name}.log", folder / name)


def test_jobs_run_at_the_same_time_and_write_logs(tmp_path):
    meet = (
        "import pathlib, sys, time\n"
        "here, other = (pathlib.Path({0!r}) / name for name in {1!r})\n"
        "here.write_text('x')\n"
        "end = time.time() + 20\n"
        "while not other.exists() and time.time() < end: time.sleep(.02)\n"
        "print('met' if other.exists() else 'alone', sys.argv[1])"
    )
    jobs = [
        job(tmp_path, one, meet.format(str(tmp_path), (one, other)))
        for one, other in (("a", "b"), ("b", "a"))
    ]
    run_jobs(jobs, 2)
    assert {(tmp_path / f"{n}.log").read_text() for n in "ab"} == {"met --cpus\n"}


def test_failed_jobs_are_reported_with_their_last_words(tmp_path):
    with pytest.raises(ValueError, match=r"a failed with exit code 3(.|\n)*alas"):
        run_jobs([job(tmp_path, "a", "print('alas'); raise SystemExit(3)")], 2)
    with pytest.raises(ValueError, match="b ended without writing b"):
        run_jobs([job(tmp_path, "b", "pass")], 1)


def test_a_job_ends_with_the_process_that_started_it(tmp_path):
    endless = job(tmp_path, "a", "print('on', flush=True)\nimport time\ntime.sleep(60)")

    def terminate():
        while "on" not in (endless.log.read_text() if endless.log.is_file() else ""):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before, thread = signal.getsignal(signal.SIGTERM), threading.Thread(target=terminate)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(SystemExit):
        run_jobs([endless], 1)
    thread.join()
    assert time.monotonic() - begin < 50 and signal.getsignal(signal.SIGTERM) is before
