"""Recipes: their phases, how a run in phases resumes, and the gain of sampled subsets."""

import functools
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import (
    assert_same_run,
    damage_checkpoint,
    load_config,
    make_run,
    metrics,
    read_run_file,
    stop_this_process,
    train_to_line,
)

from stepprune_jax.parallel.compiling import Usage
from stepprune_jax.policy import FeatureStats, PolicyConfig
from stepprune_jax.selectors import RlooSettings, StepPrune, SubsetGain, rloo
from stepprune_jax.training import dry_run as dry_run_module
from stepprune_jax.training import run as run_module
from stepprune_jax.training import train
from stepprune_jax.training.dry_run import dry_run
from stepprune_jax.training.objectives import WarmStartObjective

RLOO_CHANGES = {"rloo.longest": 0.5, "optimizer.warmup": 0}
# Six updates of the warm start, and three by RLOO.
TWO_PHASES = {"steps": 9, "warm_start.share": 2 / 3}


def make_auto_run(world, **changes):
    return make_run(*world, recipe="auto", **RLOO_CHANGES | {"steps": 15} | changes)


def choose_first_objective(monkeypatch, name):
    """Moves the bounds on gains, because the gains of a random model are noise."""
    monkeypatch.setattr(SubsetGain, "is_better_than", lambda *_: name == "warm_start")
    monkeypatch.setattr(rloo, "MIN_GAIN", -1e9 if name == "rloo" else 1e9)


@pytest.fixture(scope="module")
def two_phase_run(world, tmp_path_factory):
    """Folder of an uninterrupted run: six updates of the warm start, and three by RLOO."""
    workdir = tmp_path_factory.mktemp("phases")
    with pytest.MonkeyPatch.context() as patch:
        choose_first_objective(patch, "warm_start")
        train(make_auto_run(world, **TWO_PHASES), workdir)
    return workdir


def test_auto_begins_with_the_warm_start_if_a_trial_helps(world, two_phase_run, tmp_path):
    warm_rows, rloo_rows = metrics(two_phase_run)[:6], metrics(two_phase_run)[6:]
    assert all("covered" in row and "reward" not in row for row in warm_rows)
    assert all("reward" in row and "covered" not in row for row in rloo_rows)
    # Each phase begins with its own learning rate, 1e-3 * 64 / width, for a width of 8.
    assert [rows[0]["lr"] for rows in (warm_rows, rloo_rows)] == pytest.approx([8e-3, 8e-3])
    assert warm_rows[-1]["lr"] < 5e-3 and rloo_rows[-1]["lr"] < 5e-3
    # Each of the twelve rows counts once, although three batches have 24 rows.
    about = read_run_file(two_phase_run)
    assert about["begin"] == "warm_start" and about["trial"]["questions"] == 12
    assert about["trial"]["sets"] != about["signal"]["sets"]
    # The trial leaves no trace in the weights.
    train(make_run(*world, recipe="warm_start", **TWO_PHASES, **RLOO_CHANGES), tmp_path)
    assert_same_run(tmp_path, two_phase_run)


@pytest.fixture(scope="module")
def rloo_run(world, tmp_path_factory):
    """Folder of a run of three updates by RLOO."""
    workdir = tmp_path_factory.mktemp("rloo")
    train(make_run(*world, recipe="rloo", steps=3, **RLOO_CHANGES), workdir)
    return workdir


@pytest.mark.parametrize("recipe", ["auto", "warm_start"])
def test_a_run_without_updates_of_the_warm_start_equals_rloo(
    world, rloo_run, tmp_path, monkeypatch, recipe
):
    monkeypatch.setattr(rloo, "MIN_GAIN", -1e9)
    changes = {"steps": 3, "warm_start.share": 0.0} | RLOO_CHANGES
    train(make_run(*world, recipe=recipe, **changes), tmp_path)
    assert_same_run(tmp_path, rloo_run)


def test_auto_uses_rloo_if_the_trial_fails_and_subsets_gain_enough(
    world, rloo_run, tmp_path, monkeypatch, capsys
):
    choose_first_objective(monkeypatch, "rloo")
    train(make_auto_run(world, steps=3), tmp_path)
    output = capsys.readouterr().out
    assert "Recipe: RLOO on sampled subsets, because a few tokens gain" in output
    assert "a trial of the warm start does not help" in output
    assert_same_run(tmp_path, rloo_run)


def test_auto_begins_with_the_gate_if_nothing_else_helps(world, tmp_path, monkeypatch):
    choose_first_objective(monkeypatch, "gate")
    train(make_auto_run(world), tmp_path)
    gate_rows, rloo_rows = metrics(tmp_path)[:12], metrics(tmp_path)[12:]
    assert all("iou" in row and "reward" not in row for row in gate_rows)
    assert all("reward" in row and "iou" not in row for row in rloo_rows)
    first_rates = [rows[0]["lr"] for rows in (gate_rows, rloo_rows)]
    assert first_rates == pytest.approx([1e-3, 8e-3])
    assert read_run_file(tmp_path)["begin"] == "gate"


def test_a_run_in_phases_resumes_after_any_stop(
    world, two_phase_run, tmp_path, monkeypatch, capsys
):
    """Stops during the trial, in the first phase, at the switch and in the second phase."""
    choose_first_objective(monkeypatch, "warm_start")
    run = make_auto_run(world, **TWO_PHASES)
    decide = run_module._decide

    def stop_and_decide(*arguments):
        stop_this_process()
        return decide(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_decide", stop_and_decide)
        assert train(run, tmp_path) == signal.SIGTERM
    assert "Stopped before the first update" in capsys.readouterr().out
    assert "begin" not in read_run_file(tmp_path)
    recipe = "Recipe: the warm start for 6 updates, then RLOO on sampled subsets, because"
    for done, num_lines in ((2, 2), (6, 4), (7, 1)):
        train_to_line(monkeypatch, num_lines, run, tmp_path)
        output = capsys.readouterr().out
        assert f"Stopped after step {done} of 9" in output
        assert (recipe in output) == (done == 2)
        switch = "Update 7: RLOO on sampled subsets from here on"
        assert (switch in output) == (done == 7)
        # A resumed run must keep its decision.
        choose_first_objective(monkeypatch, "gate")
    # The last checkpoint is damaged. The checkpoint before it is in the first phase.
    damage_checkpoint(tmp_path, 7)
    train(run, tmp_path)
    output = capsys.readouterr().out
    assert "Resuming after step 6" in output and "step 9/9  rloo  loss" in output
    assert_same_run(tmp_path, two_phase_run)


def test_a_resumed_run_needs_a_known_first_objective(world, tmp_path, monkeypatch):
    choose_first_objective(monkeypatch, "gate")
    train_to_line(monkeypatch, 2, make_auto_run(world), tmp_path)
    about = read_run_file(tmp_path) | {"begin": "x"}
    (tmp_path / "run.json").write_text(json.dumps(about))
    message = r"run\.json: 'begin' is 'x', expected one of gate, rloo, warm_start"
    with pytest.raises(ValueError, match=message):
        train(make_auto_run(world), tmp_path)


def test_auto_trains_a_method_that_cannot_sample_through_the_gate(
    world, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(StepPrune, "samples_subsets", False)
    train(make_auto_run(world, steps=12), tmp_path / "auto")
    assert "Recipe: the gate, because stepprune cannot sample" in capsys.readouterr().out
    train(make_run(*world, recipe="gate", steps=12, **RLOO_CHANGES), tmp_path / "gate")
    assert metrics(tmp_path / "auto") == metrics(tmp_path / "gate")
    message = r"config\.recipe is 'rloo', expected gate or auto, as stepprune cannot"
    with pytest.raises(ValueError, match=message):
        make_run(*world, recipe="rloo", **RLOO_CHANGES)


def test_a_recipe_that_cannot_be_followed_is_refused(world):
    with pytest.raises(ValueError, match=r"config\.recipe is 'x', expected one of gate, rloo .*"):
        make_run(*world, recipe="x")
    with pytest.raises(ValueError, match=r"warmup is 3, .* shorter phase of config\.steps \(3\)"):
        make_auto_run(world, **{"optimizer.warmup": 3})


def test_fewer_steps_shorten_the_warmup_of_the_learning_rate(capsys):
    run = load_config("llava7b")
    short_run = run.replace({"steps": 90})  # A phase may have a fifth of the updates.
    assert (run.optimizer.warmup, short_run.optimizer.warmup) == (40, 1)
    assert "config.optimizer.warmup is 1 instead of 40" in capsys.readouterr().out
    assert run.replace({"steps": 90, "optimizer.warmup": 7}).optimizer.warmup == 7
    with pytest.raises(ValueError, match=r"config\.optimizer\.warmup is 40, expected .* \(18\)"):
        run.replace({"steps": 90, "optimizer.warmup": 40})
    assert run.replace({"steps": 500}).optimizer.warmup == 40


def test_configurations_have_the_phases_of_their_recipes():
    runs = {name: load_config(name) for name in ("llava7b", "llava7b:gate", "llava7b:literal")}
    assert [run.recipe for run in runs.values()] == ["auto", "gate", "gate"]
    # The paper's recipes take one token a step.
    assert [run.policy.group for run in runs.values()] == [4, 1, 1]
    assert load_config("rloo:llava7b").policy.group == 4 and load_config("shapes").policy.group == 1
    assert load_config("qwen25vl_3b").recipe == "auto" and load_config("shapes").recipe == "gate"
    run = runs["llava7b"]
    warm_phase, rloo_phase = run.make_recipe().phases(run.steps)
    assert warm_phase.objective == WarmStartObjective()
    assert (warm_phase.num_steps, rloo_phase.num_steps, rloo_phase.last) == (640, 960, 1600)
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
        "phase       the warm start",
        "phase       RLOO on sampled subsets",
        "hours for 6 updates",
        "hours for 9 updates",
        "hours for 15 updates",
    ):
        assert words in output
    lines = output.splitlines()
    flops = [float(line.split()[1]) for line in lines if line.startswith("operations")]
    expected = (2 * flops[0] + 3 * flops[1]) / 5
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
    next_function = "with Policy.rloo_loss" if suffices else "first with Policy.warm_start_loss"
    assert f"\nnext: train {next_function}" in str(gain)


def test_a_gain_suffices_if_it_is_larger_than_its_error():
    gain = SubsetGain(sets=0.6, luck=0.5, all=1.0, error=0.01, questions=512)
    assert gain.gain == pytest.approx(0.2) and gain.suffices
    assert not gain._replace(error=0.08).suffices
    # An improvement has to exceed two standard errors, here 2 * sqrt(2) * 0.01.
    assert gain._replace(sets=0.63).is_better_than(gain)
    assert not gain._replace(sets=0.62).is_better_than(gain)
    # Rewards that spread by luck gain no more than the tokens of another image.
    assert not gain._replace(sets=0.51).suffices
    no_gain = gain._replace(all=0.4)
    assert no_gain.gain == 0 and not no_gain.suffices and "0.0 +- 0.0 %" in str(no_gain)
    assert "next: check answer_loss_fn" in str(no_gain)


@pytest.mark.slow
def test_several_devices_decide_and_train_as_one_device(world, tmp_path, monkeypatch):
    choose_first_objective(monkeypatch, "warm_start")
    for name, mesh in (("one", "single"), ("many", "data=4,fsdp=2")):
        train(make_auto_run(world, steps=5, mesh=mesh), tmp_path / name)
    files = [read_run_file(tmp_path / name) for name in ("one", "many")]
    for gain in ("signal", "trial"):
        assert files[1][gain] == pytest.approx(files[0][gain], rel=1e-4)
    for row, expected in zip(metrics(tmp_path / "many"), metrics(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
