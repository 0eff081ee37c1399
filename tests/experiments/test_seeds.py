"""Training on several seeds: which runs are trained and evaluated, and parallel processes."""

import json
import os
import signal
import sys
import threading
import time

import pytest
from small_world import ROOT, one_shot, stepprune, write_split

from experiments.studies import seeds
from experiments.studies.processes import Job, run_jobs
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.workdir.checkpoints import FOLDER

CONFIG = str(ROOT / "configs" / "shapes.py")


@pytest.fixture(scope="module")
def changes(llava_folder, tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("test", "validation")):
        write_split(data, name, 2, seed)
    (data / "train.json").write_text("[]")
    small = ["eval.budgets=[4, 2]", "eval.batch_size=4", "eval.methods=all,random", "steps=100"]
    return [f"model.folder={llava_folder}", f"data.folder={data}", *small]


@pytest.fixture
def trained(monkeypatch):
    """Replaces training by writing a policy, and records the names of the runs."""
    calls = []

    def train(config, folder):
        calls.append(folder.name)
        make_policy = one_shot if config.method == "autoselect" else stepprune
        save_policy(make_policy(config.seed), folder / "policy.safetensors")
        (folder / FOLDER / "100").mkdir(parents=True)  # A folder with a checkpoint is claimed.

    monkeypatch.setattr(seeds.training, "train", train)
    return calls


@pytest.mark.slow
def test_each_row_and_seed_is_trained_and_evaluated_once(changes, trained, tmp_path, capsys):
    def run(rows=("default", "autoselect"), seed_list=(0, 1), more_changes=()):
        return seeds.run_seeds(CONFIG, tmp_path, seed_list, rows, changes=[*changes, *more_changes])

    result = run()
    assert trained == ["default-0", "autoselect-0", "default-1", "autoselect-1"]
    table = {(row["method"], row["mode"], row["pruning_rate"]): row for row in result["rows"]}
    assert table["StepPrune", "exact", 55.6]["seeds"] == 2
    assert table["StepPrune", "adaptive", 77.8]["accuracy_std"] is not None
    assert table["AutoSelect-like", "exact", 77.8]["seeds"] == 2
    assert table["all tokens", "exact", 0.0]["seeds"] == 1
    assert json.loads((tmp_path / "report" / "seeds.json").read_text()) == result
    report = (tmp_path / "report" / "seeds.md").read_text()
    assert "| method | mode | runs | 4 | 2 |" in report and "| StepPrune | adaptive | 2 |" in report
    # The second run neither trains nor evaluates, nor loads the model.
    capsys.readouterr()
    assert run() == result and len(trained) == 4
    # Only a changed policy is evaluated again.
    save_policy(stepprune(9), tmp_path / "default-1" / "policy.safetensors")
    run()
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluating" in line]
    assert lines == ["evaluating StepPrune, seed 1"]
    modes = {(row["method"], row["mode"]) for row in result["rows"]}
    assert ("StepPrune, own stop", "adaptive") in modes
    assert ("AutoSelect-like, own stop", "adaptive") not in modes
    # A run with other settings is refused.
    with pytest.raises(ValueError, match=r"folder of another run(.|\n)*config.steps: 100 -> 200"):
        run(seed_list=[0], more_changes=["steps=200"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": ["default", "best"]}, r"--rows is \['default', 'best'\], expected distinct"),
        ({"seeds": [1, 1]}, r"--seeds is \[1, 1\], expected distinct"),
        ({"seeds": [3]}, r"default-3 has no policy.*was interrupted"),
    ],
)
def test_an_error_names_the_invalid_argument(changes, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(seeds.training, "train", lambda config, folder: None)
    options = {"seeds": [0], "rows": ["default"]} | arguments
    with pytest.raises(ValueError, match=message):
        seeds.run_seeds(CONFIG, tmp_path, **options, changes=changes)


def test_a_variant_changes_the_configuration():
    runs = {key: seeds.variant_run(CONFIG, key, []) for key in seeds.VARIANTS}
    assert runs["literal"].policy.stop == "softmax"
    assert runs["autoselect"].method == "autoselect"
    assert seeds.variant_run(CONFIG, "autoselect", ["text_gate_anneal=0.5"]).text_gate_anneal == 0.5


@pytest.mark.parametrize("changes", [[], ["optimizer.lr=0.1"]])
def test_a_variant_scales_the_learning_rates_unless_they_are_changed(changes):
    base = seeds.configurations.load("llava7b").optimizer
    scaled = seeds.variant_run("llava7b", "autoselect", changes).optimizer
    assert (scaled.lr, scaled.muon_lr) == (0.1 if changes else base.lr / 2, 0)


def job(folder, name, code):
    return Job(name, [sys.executable, "-c", code], folder / f"{name}.log", folder / name)


MEET = """
import pathlib, sys, time
here, other = map(pathlib.Path, {!r})
here.write_text('x')
end = time.time() + 600
while not other.exists() and time.time() < end: time.sleep(.02)
print('met' if other.exists() else 'alone', sys.argv[1])
"""


def test_jobs_run_in_parallel_and_write_logs(tmp_path):
    files = [str(tmp_path / name) for name in "ab"]
    codes = [MEET.format(files), MEET.format(files[::-1])]
    run_jobs([job(tmp_path, name, code) for name, code in zip("ab", codes, strict=True)], 2)
    assert {(tmp_path / f"{name}.log").read_text() for name in "ab"} == {"met --cpus\n"}


def test_the_error_of_a_failed_job_has_the_end_of_its_log(tmp_path):
    with pytest.raises(ValueError, match=r"a failed with exit code 3(.|\n)*alas"):
        run_jobs([job(tmp_path, "a", "print('alas'); raise SystemExit(3)")], 2)
    good = job(tmp_path, "good", f"open({str(tmp_path / 'good')!r}, 'w')")
    with pytest.raises(ValueError, match="b ended without writing b"):
        run_jobs([good, job(tmp_path, "b", "pass")], 1)


def test_sigterm_ends_the_jobs_of_a_process(tmp_path):
    code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(3600)"
    endless_job = job(tmp_path, "a", code)

    def terminate():
        while not (endless_job.log.is_file() and endless_job.log.read_text().endswith("\n")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    previous, thread = signal.getsignal(signal.SIGTERM), threading.Thread(target=terminate)
    thread.start()
    with pytest.raises(SystemExit):
        run_jobs([endless_job], 1)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is previous
    with pytest.raises(ProcessLookupError):
        os.kill(int(endless_job.log.read_text()), 0)
