"""The recipe "auto": what it measures, which phases follow, and how it resumes."""

import dataclasses
import functools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import at_line, load_config, make_run, metrics

from stepprune_jax.parallel.compiling import Usage
from stepprune_jax.policy import FeatureStats, PolicyConfig
from stepprune_jax.selectors import (
    RlooSettings,
    StepPrune,
    SubsetGain,
    rloo,
)
from stepprune_jax.training import dry_run as dry_run_module
from stepprune_jax.training import rloo_run, train
from stepprune_jax.training import run as run_module
from stepprune_jax.training.dry_run import dry_run
from stepprune_jax.training.settings import split

SETS = {"policy_gradient.longest": 0.5, "optimizer.warmup": 0}


def auto(world, **changes):
    return make_run(*world, recipe="auto", **SETS | {"steps": 15} | changes)


def decide(monkeypatch, begin):
    """What a model of random weights gains is noise: moves the bound to either side."""
    least = {"sets": -1e9, "gate": 1e9}[begin]
    monkeypatch.setattr(rloo, "MIN_GAIN", least)


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def begin(workdir):
    return json.loads((workdir / "run.json").read_text())["begin"]


@pytest.fixture(scope="module")
def both(world, tmp_path_factory):
    """An uninterrupted run of twelve updates through the gate, and three on sets."""
    workdir = tmp_path_factory.mktemp("both")
    with pytest.MonkeyPatch.context() as patch:
        decide(patch, "gate")
        train(auto(world), workdir)
    return workdir


def test_a_run_whose_sets_carry_a_signal_is_that_of_sampled_sets(
    world, tmp_path, monkeypatch, capsys
):
    decide(monkeypatch, "sets")
    train(auto(world, steps=3), tmp_path / "auto")
    said = capsys.readouterr().out
    assert "Recipe: sampled sets, because a few tokens gain" in said
    train(rloo_run(make_run(*world, steps=3, **SETS)), tmp_path / "sets")
    assert metrics(tmp_path / "auto") == metrics(tmp_path / "sets")
    one, other = (tmp_path / name / "policy.safetensors" for name in ("auto", "sets"))
    assert one.read_bytes() == other.read_bytes()
    told = json.loads((tmp_path / "auto" / "run.json").read_text())
    # Each of the twelve rows once, though three batches have 24.
    assert told["begin"] == "sets" and told["signal"]["questions"] == 12


def test_a_run_whose_sets_carry_none_begins_with_the_gate(world, both, capsys):
    gated, sampled = metrics(both)[:12], metrics(both)[12:]
    assert all("iou" in row and "reward" not in row for row in gated)
    assert all("reward" in row and "iou" not in row for row in sampled)
    # Each phase begins with the rate of its recipe alone; that of sets is of a width of 8.
    assert [rows[0]["lr"] for rows in (gated, sampled)] == pytest.approx([1e-3, 8e-3])
    assert gated[-1]["lr"] < 5e-4 and sampled[-1]["lr"] < 8e-3
    assert begin(both) == "gate"


def test_it_resumes_wherever_it_is_stopped(world, both, tmp_path, monkeypatch, capsys):
    """While it looks, in the first phase, at the switch, and in the second phase."""
    decide(monkeypatch, "gate")
    decisions = run_module._decide

    def looking(*arguments):
        stop()
        return decisions(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_decide", looking)
        assert train(auto(world), tmp_path) == signal.SIGTERM
    assert "Stopped before the first update" in capsys.readouterr().out
    assert "begin" not in json.loads((tmp_path / "run.json").read_text())
    for done, lines in ((2, 2), (12, 10), (13, 1)):
        at_line(monkeypatch, lines, stop)
        train(auto(world), tmp_path)
        said = capsys.readouterr().out
        assert f"Stopped after step {done} of 15" in said
        assert ("Recipe: the gate for 12 updates, then sampled sets, because" in said) == (
            done == 2
        )
        assert ("Update 13: sampled sets from here on" in said) == (done == 13)
        decide(monkeypatch, "sets")  # what was decided is not decided again
    # The last checkpoint is damaged, and the one before is of the other phase.
    for path in (tmp_path / "checkpoints" / "13").glob("arrays/**/d/*"):
        path.write_bytes(path.read_bytes()[:-9])
    train(auto(world), tmp_path)
    said = capsys.readouterr().out
    assert "Resuming after step 12" in said and "step 15/15  sets  loss" in said
    assert metrics(tmp_path) == metrics(both)
    one, other = (folder / "policy.safetensors" for folder in (tmp_path, both))
    assert one.read_bytes() == other.read_bytes()


def test_a_run_from_before_there_were_recipes_goes_on_as_it_began(
    world, both, tmp_path, monkeypatch
):
    at_line(monkeypatch, 2, stop)
    train(make_run(*world, steps=12, **SETS), tmp_path)
    about = json.loads((tmp_path / "run.json").read_text())
    del about["config"]["recipe"]
    (tmp_path / "run.json").write_text(json.dumps(about))
    train(auto(world, steps=12), tmp_path)
    assert metrics(tmp_path) == metrics(both)[:12]  # all of it through the gate


def test_a_method_that_draws_no_sets_is_trained_through_the_gate(
    world, both, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(StepPrune, "samples_subsets", False)
    run = auto(world, steps=12)
    train(run, tmp_path)
    said = capsys.readouterr().out
    assert "Recipe: the gate, because stepprune draws no sets of tokens" in said
    assert metrics(tmp_path) == metrics(both)[:12] and begin(tmp_path) == "gate"
    with pytest.raises(
        ValueError, match=r"config\.recipe is 'sets', expected gate or auto, as ste"
    ):
        train(dataclasses.replace(run, recipe="sets"), tmp_path / "sets")


def test_the_recipe_is_refused_where_it_cannot_be_followed(world):
    with pytest.raises(
        ValueError, match=r"config\.recipe is 'x', expected one of gate, sets, auto"
    ):
        make_run(*world, recipe="x")
    with pytest.raises(ValueError, match=r"config\.recipe is 'auto', expected sets, or .* it is 2"):
        auto(world, **{"policy_gradient.samples": 2})
    with pytest.raises(ValueError, match=r"warmup is 3, .* shorter phase of config\.steps \(3\)"):
        auto(world, **{"optimizer.warmup": 3})


def test_configurations_name_their_recipes():
    given = {name: load_config(name) for name in ("llava7b", "llava7b:gate", "llava7b:literal")}
    assert [run.recipe for run in given.values()] == ["auto", None, None]
    assert load_config("qwen25vl_3b").recipe == "auto" and load_config("shapes").recipe is None
    gate, sets = split(given["llava7b"])
    assert gate.run.optimizer == load_config("llava7b:short").optimizer
    sampled = load_config("rloo:llava7b")
    assert (gate.run.steps, sets.run) == (1280, sampled.replace({"steps": 320}))
    assert split(sampled) == split(sampled.replace({"recipe": "sets"}))
    (alone,) = split(load_config("shapes").replace({"recipe": "sets", "steps": 1600}))
    assert alone.run == load_config("rloo:shapes")


def test_a_dry_run_counts_both_phases(world, tmp_path, monkeypatch, capsys):
    sizes = iter([1 << 30, 3 << 30])  # instead of compiling
    monkeypatch.setattr(dry_run_module, "planned_memory", lambda *_: Usage(0, 0, 0, next(sizes)))
    found = dry_run(auto(world), tmp_path)
    said = capsys.readouterr().out
    assert "phase       the gate" in said and "phase       sampled sets" in said
    assert (
        "hours for 12 updates" in said
        and "hours for 3 updates" in said
        and "if all 15 updates are on sampled" in said
    )
    flops = [float(line.split()[1]) for line in said.splitlines() if line.startswith("operations")]
    assert flops[0] != flops[1] and found.flops == pytest.approx(
        (4 * flops[0] + flops[1]) / 5, rel=0.01
    )
    assert found.memory.total == 3 << 30


N, D, SIZE = 16, 8, 256


@functools.partial(jax.jit, static_argnums=1)
def rewarded(kept, needed):
    """The loss of a reader that needs so many of the first tokens; otherwise it guesses."""
    there = jnp.zeros((*kept.index.shape[:2], N), bool)
    at = jnp.arange(SIZE)[:, None, None], jnp.arange(kept.index.shape[1])[:, None], kept.index
    there = there.at[at].max(kept.valid)
    own = kept.tokens[..., 0].max(-1) == jnp.arange(SIZE)[:, None]  # tokens tell their image
    return jnp.where(there[..., :needed].all(-1) & own, 0.0, 3.0)


@pytest.mark.parametrize(("needed", "gains"), [(1, True), (4, False)])
def test_sets_are_tried_against_those_of_another_image(needed, gains):
    config = PolicyConfig(feature_width=D, text_width=0, num_heads=2, encoder_layers=1)
    policy = StepPrune.init(jax.random.key(0), config, FeatureStats.start(D))
    image = jax.random.normal(jax.random.key(1), (SIZE, N, D))
    image = image.at[..., 0].set(jnp.arange(SIZE)[:, None])
    settings = RlooSettings(samples=8, longest=0.25)
    losses = functools.partial(rewarded, needed=needed)
    found = policy.measure_subset_gain(jax.random.key(2), image, None, losses, settings)
    guess = float(np.exp(-3.0))
    np.testing.assert_allclose([found.all, found.luck], [1, guess], rtol=1e-5)
    assert found.suffices == gains and found.questions == SIZE
    assert ("clearly more" if gains else "not clearly more") in str(found)


def test_what_sets_gain_has_to_be_clear():
    signal = SubsetGain(sets=0.6, luck=0.5, all=1.0, error=0.01, questions=512)
    assert signal.gain == pytest.approx(0.2) and signal.suffices
    assert not signal._replace(error=0.08).suffices
    # Any spread of rewards that is luck: no more than another image's tokens gain.
    assert not signal._replace(sets=0.51).suffices
    blind = signal._replace(all=0.4)
    assert blind.gain == 0 and not blind.suffices and "0.0 +- 0.0 %" in str(blind)


@pytest.mark.slow
def test_several_devices_decide_and_train_as_one_does(world, tmp_path, monkeypatch):
    decide(monkeypatch, "gate")
    for name, mesh in (("one", "single"), ("many", "data=4,fsdp=2")):
        train(auto(world, steps=5, mesh=mesh), tmp_path / name)
    one, many = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "many"))
    assert many["signal"] == pytest.approx(one["signal"], rel=1e-4)
    for rows in zip(metrics(tmp_path / "one"), metrics(tmp_path / "many"), strict=True):
        assert rows[1] == pytest.approx(rows[0], rel=1e-4, abs=1e-6)
