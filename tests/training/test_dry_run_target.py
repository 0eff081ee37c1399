"""A dry run for devices that are not present, with their own compiler or the CPU's."""

import jax
import pytest
from tiny_run import ROOT, make_run

from stepprune_jax import configurations
from stepprune_jax.checkpoints import hub
from stepprune_jax.checkpoints.shipped import PUBLISHED_CONFIGS, read_shipped_config
from stepprune_jax.models.families import find_family
from stepprune_jax.parallel import aot_targets
from stepprune_jax.parallel.compiling import Usage
from stepprune_jax.training import dry_run as dry_run_module
from stepprune_jax.training.batches import Bucket
from stepprune_jax.training.dry_run import RunCost, dry_run
from stepprune_jax.user_input import UserError

# Configurations of published models.
PUBLISHED = sorted(
    path.stem for path in (ROOT / "configs").glob("*.py") if path.stem.startswith(("llava", "qwen"))
)


def make_quick_run(world, **changes):
    """Returns settings without Muon, which takes most of the time to compile."""
    return make_run(*world, **{"optimizer.muon_lr": 0.0, "mesh": "data"} | changes)


@pytest.mark.parametrize(
    ("name", "kind"), [("a6000:2", "NVIDIA RTX A6000"), ("v5e", "TPU v5 lite")]
)
def test_the_compiler_of_the_target_plans(world, tmp_path, capsys, name, kind):
    problem = aot_targets.missing(name)
    if problem:
        pytest.skip(problem)
    changes = {"mesh": "single"} if name == "v5e" else {}
    cost = dry_run(make_quick_run(world, **changes), tmp_path, name)
    target = aot_targets.read_name(name)
    assert cost.devices == target.count
    assert cost.weights < cost.memory.arguments and cost.memory.temporary > 0
    output = capsys.readouterr().out
    assert f"{target.count} {kind} device(s)" in output
    assert f"as XLA's {'TPU' if name == 'v5e' else 'GPU'} compiler plans" in output
    assert f"{target.accelerator}: " in output and "GiB, fits" in output


def test_without_data_rows_have_the_assumed_length(world, tmp_path, capsys, monkeypatch):
    all_widths = []
    cost = RunCost(2, 0, Usage(0, 0, 0, 0), 1.0, {Bucket(16, 16, 11): 1})

    def measure_cost(widths, *arguments):
        all_widths.append(widths)
        return cost

    monkeypatch.setattr(dry_run_module, "measure_cost", measure_cost)
    changes = {"data.folder": str(tmp_path / "none"), "data.length_multiple": 8}
    changes |= {"data.context_limit": 60, "data.policy_text_limit": 20, "accelerator.ids": 11}
    dry_run(make_quick_run(world, **changes), tmp_path, "a6000:2")
    # The longest row has 60 - 9 ids besides its image, which is one id.
    assert all_widths == [({Bucket(16, 16, 11): 1}, Bucket(56, 20, 52))]
    output = capsys.readouterr().out
    assert "none: assuming 11 ids of every row" in output and "16 ids 100%" in output
    for change, message in (
        ({"accelerator.ids": 53}, r"config.accelerator.ids is 53, expected at most 52"),
        ({"data.context_limit": 9}, r"config.data.context_limit is 9, expected more than the 9"),
    ):
        with pytest.raises(ValueError, match=message):
            dry_run(make_quick_run(world, **changes | change), tmp_path, "a6000:2")


def test_a_plan_that_does_not_fit_lists_changes(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dry_run_module, "missing", lambda name: "pip x")
    memory = Usage(20, 0, 10**12, 10**12 + 20)
    cost = RunCost(2, 10, memory, 1e9, {Bucket(64, 64, 8): 1})
    monkeypatch.setattr(dry_run_module, "measure_cost", lambda *arguments: cost)
    dry_run(make_quick_run(world), tmp_path, "a6000:2")
    output = capsys.readouterr().out
    assert "a6000:2: pip x; planning with the CPU's compiler" in output
    verdict, change = output.splitlines()[-4:-2]
    assert "rtx-a6000: 44.7 GiB, DOES NOT FIT (2083%)" in verdict
    assert "set config.mesh=fsdp (shards the weights over 2 devices)" in change

    def exhaust_memory(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 26.4G of 15.75G hbm.\nAll: ...")

    monkeypatch.setattr(dry_run_module, "measure_cost", exhaust_memory)
    with pytest.raises(ValueError, match=r"mesh=fsdp .*2 devices.* 26.4G of") as error:
        dry_run(make_quick_run(world), tmp_path, "a6000:2")
    assert isinstance(error.value, UserError) and "\n" not in str(error.value)


def test_a_bad_target_is_refused_before_anything_is_read(world, tmp_path):
    run = make_quick_run(world, **{"model.folder": "./none"})
    with pytest.raises(ValueError, match="target 'h20' is unknown"):
        dry_run(run, tmp_path, "h20")
    with pytest.raises(ValueError, match="target 'h20' is unknown"):
        dry_run_module.use_virtual_devices(run, "h20")


def refuse_download(source, patterns):
    raise FileNotFoundError(f"fetching {source} failed")


def test_a_published_model_is_planned_without_a_network(world, tmp_path, capsys, monkeypatch):
    """Even with data, rows have the assumed length, because the tokenizer is not at hand."""
    configs, widths = [], []

    def measure_cost(width, config, *arguments):
        configs.append(config)
        widths.append(width)
        return RunCost(2, 0, Usage(0, 0, 0, 0), 1.0, {Bucket(16, 16, 11): 1})

    monkeypatch.setattr(dry_run_module, "measure_cost", measure_cost)
    monkeypatch.setattr(hub, "download", refuse_download)
    changes = {"model.folder": "llava-hf/llava-1.5-7b-hf", "data.length_multiple": 8}
    dry_run(make_quick_run(world, **changes | {"accelerator.ids": 11}), tmp_path, "a6000:2")
    model = configs[0].backbone.config
    assert (model.max_image_tokens, model.token_width, model.text.num_layers) == (576, 1024, 32)
    assert [*widths[0].counts] == [Bucket(16, 16, 11)]
    output = capsys.readouterr().out
    assert "no access to the hub: planning with the package's configuration of" in output
    assert "no tokenizer of llava-hf/llava-1.5-7b-hf: assuming 11 ids of every row" in output
    run = make_quick_run(world, **changes | {"model.folder": "llava-hf/other"})
    with pytest.raises(FileNotFoundError, match="fetching llava-hf/other failed"):
        dry_run(run, tmp_path, "a6000:2")


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_configuration_has_a_copy_of_its_model(name):
    hub_id = configurations.load(name).model.folder
    config = read_shipped_config(PUBLISHED_CONFIGS[hub_id])
    family = find_family(config, hub_id).name
    expected = {"1.5": "llava", "v1.6": "llava_next", "Qwen2.5": "qwen2_5_vl", "Qwen3": "qwen3_vl"}
    assert family == next(expected[key] for key in expected if key in hub_id)
