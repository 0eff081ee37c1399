"""Recipes: their phases, the measurement of "auto", and how a run in phases resumes."""

import dataclasses
import functools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import call_at_line, load_config, make_run, metrics

from stepprune_jax.parallel.compiling import Usage
from stepprune_jax.policy import FeatureStats, PolicyConfig
from stepprune_jax.selectors import RlooSettings, StepPrune, SubsetGain, rloo
from stepprune_jax.training import dry_run as dry_run_module
from stepprune_jax.training import run as run_module
from stepprune_jax.training import train
from stepprune_jax.training.dry_run import dry_run

RLOO_CHANGES = {"rloo.longest": 0.5, "optimizer.warmup": 0}


def make_auto_run(world, **changes):
    return make_run(*world, recipe="auto", **RLOO_CHANGES | {"steps": 15} | changes)


def choose_first_objective(monkeypatch, name):
    """Moves the bound on the gain, because the gain of a random model is noise."""
    least_gain = {"rloo": -1e9, "gate": 1e9}[name]
    monkeypatch.setattr(rloo, "MIN_GAIN", least_gain)


def stop_this_process():
    os.kill(os.getpid(), signal.SIGTERM)


def read_run_file(workdir):
    return json.loads((workdir / "run.json").read_text())


@pytest.fixture(scope="module")
def two_phase_run(world, tmp_path_factory):
    """Folder of an uninterrupted run of twelve updates through the gate, and three by RLOO."""
    workdir = tmp_path_factory.mktemp("phases")
    with pytest.MonkeyPatch.context() as patch:
        choose_first_objective(patch, "gate")
        train(make_auto_run(world), workdir)
    return workdir


def assert_same_policy(workdir, expected_workdir):
    name = "policy.safetensors"
    assert (workdir / name).read_bytes() == (expected_workdir / name).read_bytes()


def test_auto_equals_rloo_if_subsets_gain_enough(world, tmp_path, monkeypatch, capsys):
    choose_first_objective(monkeypatch, "rloo")
    train(make_auto_run(world, steps=3), tmp_path / "auto")
    output = capsys.readouterr().out
    assert "Recipe: RLOO on sampled subsets, because a few tokens gain" in output
    train(make_run(*world, recipe="rloo", steps=3, **RLOO_CHANGES), tmp_path / "rloo")
    assert metrics(tmp_path / "auto") == metrics(tmp_path / "rloo")
    assert_same_policy(tmp_path / "auto", tmp_path / "rloo")
    about = read_run_file(tmp_path / "auto")
    # Each of the twelve rows counts once, although three batches have 24 rows.
    assert about["begin"] == "rloo" and about["signal"]["questions"] == 12


def test_auto_begins_with_the_gate_if_subsets_gain_too_little(two_phase_run):
    gate_rows, rloo_rows = metrics(two_phase_run)[:12], metrics(two_phase_run)[12:]
    assert all("iou" in row and "reward" not in row for row in gate_rows)
    assert all("reward" in row and "iou" not in row for row in rloo_rows)
    # Each phase begins with the learning rate of its recipe. The rate of RLOO is for a width of 8.
    first_rates = [rows[0]["lr"] for rows in (gate_rows, rloo_rows)]
    assert first_rates == pytest.approx([1e-3, 8e-3])
    assert gate_rows[-1]["lr"] < 5e-4 and rloo_rows[-1]["lr"] < 8e-3
    assert read_run_file(two_phase_run)["begin"] == "gate"


def test_a_run_in_phases_resumes_after_any_stop(
    world, two_phase_run, tmp_path, monkeypatch, capsys
):
    """Stops during the measurement, in the first phase, at the switch and in the second phase."""
    choose_first_objective(monkeypatch, "gate")
    decide = run_module._decide

    def stop_and_decide(*arguments):
        stop_this_process()
        return decide(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_decide", stop_and_decide)
        assert train(make_auto_run(world), tmp_path) == signal.SIGTERM
    assert "Stopped before the first update" in capsys.readouterr().out
    assert "begin" not in read_run_file(tmp_path)
    decision = "Recipe: the gate for 12 updates, then RLOO on sampled subsets, because"
    for done, num_lines in ((2, 2), (12, 10), (13, 1)):
        call_at_line(monkeypatch, num_lines, stop_this_process)
        train(make_auto_run(world), tmp_path)
        output = capsys.readouterr().out
        assert f"Stopped after step {done} of 15" in output
        assert (decision in output) == (done == 2)
        switch = "Update 13: RLOO on sampled subsets from here on"
        assert (switch in output) == (done == 13)
        # A resumed run must keep its decision.
        choose_first_objective(monkeypatch, "rloo")
    # The last checkpoint is damaged. The checkpoint before it is in the first phase.
    for path in (tmp_path / "checkpoints" / "13").glob("arrays/**/d/*"):
        path.write_bytes(path.read_bytes()[:-9])
    train(make_auto_run(world), tmp_path)
    output = capsys.readouterr().out
    assert "Resuming after step 12" in output and "step 15/15  rloo  loss" in output
    assert metrics(tmp_path) == metrics(two_phase_run)
    assert_same_policy(tmp_path, two_phase_run)


def test_a_resumed_run_needs_a_known_first_objective(world, tmp_path, monkeypatch):
    choose_first_objective(monkeypatch, "gate")
    call_at_line(monkeypatch, 2, stop_this_process)
    train(make_auto_run(world), tmp_path)
    about = read_run_file(tmp_path) | {"begin": "x"}
    (tmp_path / "run.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"run\.json: 'begin' is 'x', expected 'gate' or 'rloo'"):
        train(make_auto_run(world), tmp_path)


def test_auto_trains_a_method_that_cannot_sample_through_the_gate(
    world, two_phase_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(StepPrune, "samples_subsets", False)
    run = make_auto_run(world, steps=12)
    train(run, tmp_path)
    output = capsys.readouterr().out
    assert "Recipe: the gate, because stepprune cannot sample subsets of tokens" in output
    assert metrics(tmp_path) == metrics(two_phase_run)[:12]
    assert read_run_file(tmp_path)["begin"] == "gate"
    message = r"config\.recipe is 'rloo', expected gate or auto, as stepprune cannot"
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(run, recipe="rloo"), tmp_path / "rloo")


def test_a_recipe_that_cannot_be_followed_is_refused(world):
    with pytest.raises(ValueError, match=r"config\.recipe is 'x', expected one of gate, rloo .*"):
        make_run(*world, recipe="x")
    with pytest.raises(ValueError, match=r"warmup is 3, .* shorter phase of config\.steps \(3\)"):
        make_auto_run(world, **{"optimizer.warmup": 3})


def test_configurations_have_the_phases_of_their_recipes():
    runs = {name: load_config(name) for name in ("llava7b", "llava7b:gate", "llava7b:literal")}
    assert [run.recipe for run in runs.values()] == ["auto", "gate", "gate"]
    assert load_config("qwen25vl_3b").recipe == "auto" and load_config("shapes").recipe == "gate"
    run = runs["llava7b"]
    gate, rloo_phase = run.make_recipe().phases(run.steps)
    assert gate.optimizer == load_config("llava7b:short").optimizer
    assert (gate.num_steps, rloo_phase.num_steps, rloo_phase.last) == (1280, 320, 1600)
    (only_phase,) = load_config("rloo:llava7b").make_recipe().phases(1600)
    assert only_phase.objective == rloo_phase.objective
    assert only_phase.optimizer == rloo_phase.optimizer
    assert load_config("shapes").replace({"recipe": "rloo", "steps": 1600}) == load_config(
        "rloo:shapes"
    )


def test_a_dry_run_counts_both_phases(world, tmp_path, monkeypatch, capsys):
    sizes = iter([1 << 30, 3 << 30])  # instead of compiling
    monkeypatch.setattr(dry_run_module, "planned_memory", lambda *_: Usage(0, 0, 0, next(sizes)))
    cost = dry_run(make_auto_run(world), tmp_path)
    output = capsys.readouterr().out
    for words in (
        "phase       the gate",
        "phase       RLOO on sampled subsets",
        "hours for 12 updates",
        "hours for 3 updates",
        "if all 15 updates use RLOO on sampled subsets",
    ):
        assert words in output
    lines = output.splitlines()
    flops = [float(line.split()[1]) for line in lines if line.startswith("operations")]
    expected = (4 * flops[0] + flops[1]) / 5
    assert flops[0] != flops[1] and cost.flops == pytest.approx(expected, rel=0.01)
    assert cost.memory.total == 3 << 30


NUM_TOKENS, WIDTH, NUM_QUESTIONS = 16, 8, 256


@functools.partial(jax.jit, static_argnums=1)
def subset_losses(kept, num_needed):
    """Losses of a model that needs the first tokens of an image, and otherwise guesses."""
    shape = (*kept.index.shape[:2], NUM_TOKENS)
    subset_index = jnp.arange(kept.index.shape[1])[:, None]
    place = jnp.arange(NUM_QUESTIONS)[:, None, None], subset_index, kept.index
    is_kept = jnp.zeros(shape, bool).at[place].max(kept.valid)
    # The first feature of a token is the number of its image.
    is_own_image = kept.tokens[..., 0].max(-1) == jnp.arange(NUM_QUESTIONS)[:, None]
    return jnp.where(is_kept[..., :num_needed].all(-1) & is_own_image, 0.0, 3.0)


@pytest.mark.parametrize(("num_needed", "suffices"), [(1, True), (4, False)])
def test_the_gain_compares_with_subsets_of_another_image(num_needed, suffices):
    config = PolicyConfig(feature_width=WIDTH, text_width=0, num_heads=2, encoder_layers=1)
    policy = StepPrune.init(jax.random.key(0), config, FeatureStats.start(WIDTH))
    image = jax.random.normal(jax.random.key(1), (NUM_QUESTIONS, NUM_TOKENS, WIDTH))
    image = image.at[..., 0].set(jnp.arange(NUM_QUESTIONS)[:, None])
    settings = RlooSettings(samples=8, longest=0.25)
    losses = functools.partial(subset_losses, num_needed=num_needed)
    gain = policy.measure_subset_gain(jax.random.key(2), image, None, losses, settings)
    guess_reward = float(np.exp(-3.0))
    np.testing.assert_allclose([gain.all, gain.luck], [1, guess_reward], rtol=1e-5)
    assert gain.suffices == suffices and gain.questions == NUM_QUESTIONS
    assert ("clearly more" if suffices else "not clearly more") in str(gain)


def test_a_gain_suffices_if_it_is_larger_than_its_error():
    gain = SubsetGain(sets=0.6, luck=0.5, all=1.0, error=0.01, questions=512)
    assert gain.gain == pytest.approx(0.2) and gain.suffices
    assert not gain._replace(error=0.08).suffices
    # Rewards that spread by luck gain no more than the tokens of another image.
    assert not gain._replace(sets=0.51).suffices
    no_gain = gain._replace(all=0.4)
    assert no_gain.gain == 0 and not no_gain.suffices and "0.0 +- 0.0 %" in str(no_gain)


@pytest.mark.slow
def test_several_devices_decide_and_train_as_one_device(world, tmp_path, monkeypatch):
    choose_first_objective(monkeypatch, "gate")
    for name, mesh in (("one", "single"), ("many", "data=4,fsdp=2")):
        train(make_auto_run(world, steps=5, mesh=mesh), tmp_path / name)
    expected, gain = (read_run_file(tmp_path / name)["signal"] for name in ("one", "many"))
    assert gain == pytest.approx(expected, rel=1e-4)
    for row, expected in zip(metrics(tmp_path / "many"), metrics(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
