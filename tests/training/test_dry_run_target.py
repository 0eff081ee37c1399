"""A dry run for devices that are not here, with their own compiler or without it."""

import jax
import pytest
from tiny_run import make_run

from stepprune_jax.parallel import aot_targets
from stepprune_jax.parallel.compiling import Usage
from stepprune_jax.training import dry_run as dry_run_module
from stepprune_jax.training.batches import Bucket
from stepprune_jax.training.dry_run import RunCost, dry_run
from stepprune_jax.user_input import UserError


def quick_run(world, **changes):
    """Without Muon, which is most of what there is to compile."""
    return make_run(*world, **{"optimizer.muon_lr": 0.0, "mesh": "data"} | changes)


@pytest.mark.parametrize(
    ("name", "kind"), [("a6000:2", "NVIDIA RTX A6000"), ("v5e", "TPU v5 lite")]
)
def test_the_targets_own_compiler_plans(world, tmp_path, capsys, name, kind):
    problem = aot_targets.missing(name)
    if problem:
        pytest.skip(problem)
    changes = {"mesh": "single"} if name == "v5e" else {}
    planned, named = (
        dry_run(quick_run(world, **changes), tmp_path, name),
        aot_targets.read_name(name),
    )
    assert planned.devices == named.count
    assert planned.weights < planned.memory.arguments and planned.memory.temporary > 0
    printed = capsys.readouterr().out
    assert f"{named.count} {kind} device(s)" in printed
    assert f"as XLA's {'TPU' if name == 'v5e' else 'GPU'} compiler plans" in printed
    assert f"{named.accelerator}: " in printed and "GiB, fits" in printed


def test_without_data_rows_have_the_stated_length(world, tmp_path, capsys, monkeypatch):
    asked = []
    planned = RunCost(2, 0, Usage(0, 0, 0, 0), 1.0, {Bucket(16, 16, 11): 1})
    monkeypatch.setattr(
        dry_run_module, "make_plan", lambda sampled, *others: asked.append(sampled) or planned
    )
    changes = {"data.folder": str(tmp_path / "none"), "data.length_multiple": 8}
    changes |= {"data.context_limit": 60, "data.policy_text_limit": 20, "accelerator.ids": 11}
    dry_run(quick_run(world, **changes), tmp_path, "a6000:2")
    # The longest has 60 - 9 ids beside its image, which is one id.
    assert asked == [({Bucket(16, 16, 11): 1}, Bucket(56, 20, 52))]
    said = capsys.readouterr().out
    assert "none: assuming 11 ids of every row" in said and "16 ids 100%" in said
    with pytest.raises(ValueError, match=r"config.accelerator.ids is 53, expected at most 52"):
        dry_run(quick_run(world, **changes | {"accelerator.ids": 53}), tmp_path, "a6000:2")
    with pytest.raises(
        ValueError, match=r"config.data.context_limit is 9, expected more than the 9"
    ):
        dry_run(quick_run(world, **changes | {"data.context_limit": 9}), tmp_path, "a6000:2")


def test_what_does_not_fit_is_reported_with_what_to_change(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dry_run_module, "missing", lambda name: "pip x")
    large = RunCost(2, 10, Usage(20, 0, 10**12, 10**12 + 20), 1e9, {Bucket(64, 64, 8): 1})
    monkeypatch.setattr(dry_run_module, "make_plan", lambda *arguments: large)
    dry_run(quick_run(world), tmp_path, "a6000:2")
    printed = capsys.readouterr().out
    assert "a6000:2: pip x; planning with the CPU's compiler" in printed
    verdict, change = printed.splitlines()[-4:-2]
    assert "rtx-a6000: 44.7 GiB, DOES NOT FIT (2083%)" in verdict
    assert "set config.mesh=fsdp (shards the weights over 2 devices)" in change

    def refuse(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 26.4G of 15.75G hbm.\nAll: ...")

    monkeypatch.setattr(dry_run_module, "make_plan", refuse)
    with pytest.raises(ValueError, match=r"mesh=fsdp .*2 devices.* 26.4G of") as refused:
        dry_run(quick_run(world), tmp_path, "a6000:2")
    assert isinstance(refused.value, UserError) and "\n" not in str(refused.value)


def test_a_bad_target_is_refused_before_anything_is_read(world, tmp_path):
    run = quick_run(world, **{"model.folder": "./none"})
    with pytest.raises(ValueError, match="target 'h20' is unknown"):
        dry_run(run, tmp_path, "h20")
    with pytest.raises(ValueError, match="target 'h20' is unknown"):
        dry_run_module.use_virtual_devices(run, "h20")
