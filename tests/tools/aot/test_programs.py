"""The programs of a run, and the table of the compile check."""

import dataclasses
import json
import types

import jax
import pytest
from commands import status
from tiny_qwen import tiny_qwen

from stepprune_jax import configurations, testing
from stepprune_jax.parallel.sharding import build_mesh
from tools.aot import __main__ as command
from tools.aot.programs import ROWS, Programs, backbone_of

TRAINING = {"update", "statistics", "validation"}
ANSWERING = {"tower", "rank", "take", "prefill", "prefill cut", "decode", "decode cut"}
SELECT = {f"{program} {rows}" for rows in ROWS for program in ("select", "answer")}
PICK = {f"policy.pick {rows}" for rows in ROWS} | {"policy.select_parallel"}
ALL = TRAINING | ANSWERING | SELECT | PICK | {f"select own {rows}" for rows in ROWS}


@pytest.fixture(autouse=True)
def at_root(monkeypatch, pytestconfig):
    """Runs in the root of the repository, because configurations import each other from there."""
    monkeypatch.chdir(pytestconfig.rootpath)
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath))


def tiny(tmp_path):
    """Returns the run of the shapes world with a tiny model."""
    run = configurations.load("configs/shapes.py")
    (tmp_path / "config.json").write_text(json.dumps(testing.tiny_hf_config()))
    sizes = {"width": 8, "num_heads": 2, "mlp_ratio": 1, "encoder_layers": 1, "min_tokens": 1}
    return dataclasses.replace(
        run,
        batch_size=4,
        model=dataclasses.replace(run.model, folder=str(tmp_path)),
        policy=dataclasses.replace(run.policy, **sizes),
        optimizer=dataclasses.replace(run.optimizer, muon_lr=0.0),
    )


@pytest.mark.slow
def test_every_program_has_the_requested_dtypes(tmp_path):
    mesh = build_mesh("data", jax.devices()[:2])
    programs = Programs(tiny(tmp_path), mesh, "mixed")
    assert set(programs.names()) == ALL
    for name in programs.names():
        dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(programs.trace(name).in_avals)}
        # Weights and features of the frozen model are bfloat16, and the policy is float32.
        assert ("bfloat16" in dtypes) != (name in PICK), name
        uses_policy = name in PICK or name in TRAINING - {"validation"}
        uses_policy = uses_policy or name.startswith(("select", "rank"))
        assert not uses_policy or "float32" in dtypes, name


@pytest.mark.slow
def test_programs_of_a_model_with_varying_image_sizes_are_traced(tmp_path):
    run = tiny(tmp_path)
    model = dataclasses.replace(run.model, folder=str(tiny_qwen(tmp_path / "qwen")))
    policy = dataclasses.replace(run.policy, max_steps=None)
    programs = Programs(dataclasses.replace(run, model=model, policy=policy), build_mesh(), "mixed")
    for name in ("tower", "rank", "prefill", "prefill cut", "decode", "select own 2", "answer 2"):
        assert programs.trace(name).jaxpr, name


def test_flags_change_fields_of_a_configuration():
    changes = command.parse(["--set", "model.max_pixels=3211264"]).groups[0].changes
    run = configurations.load("configs/qwen25vl_7b.py", changes)
    assert backbone_of(run).config.max_image_tokens == 4096


def test_a_selector_without_a_stop_has_only_programs_of_exact_counts(tmp_path):
    run = configurations.load("configs/shapes.py", ["method=autoselect"])
    run = dataclasses.replace(run, model=tiny(tmp_path).model)
    assert set(Programs(run, build_mesh(), "float32").names()) == TRAINING | ANSWERING | SELECT


@pytest.fixture
def card(monkeypatch):
    """A CPU in place of a GPU, which records the lowered programs in `lowered_programs`."""
    target = types.SimpleNamespace(devices=jax.devices()[:1], lowered_programs=[])

    def compile_here(lowered):
        target.lowered_programs.append(lowered)
        return lowered.compile()

    target.compile = compile_here
    monkeypatch.setattr(command, "make_target", lambda name: target)
    monkeypatch.setattr(command, "known_as", lambda kind: "h200")
    return target


def test_each_program_has_a_row_and_shared_programs_are_compiled_once(card, capsys):
    configs = [command.SHAPES, f"{command.SHAPES}:literal"]
    flags = ["--target", "h200", "--config", *configs, "--program", "take", "policy.pick 1"]
    assert command.main(flags) == 0
    lines = [x.strip("| ").split(" | ") for x in capsys.readouterr().out.splitlines()[2:]]
    assert [line[:5] for line in lines] == [
        ["h200", "1", config, "float32", program]
        for config in configs
        for program in ("take", "policy.pick 1")
    ]
    assert len(card.lowered_programs) == 3
    assert lines[2][-2:] == ["0", f"ok (as {command.SHAPES}, float32)"]
    # The literal configuration has another stop.
    assert lines[0][-1] == lines[1][-1] == lines[3][-1] == "ok"
    in_loops, _, in_all = lines[1][6].partition("; ")
    assert lines[0][6] == lines[2][6] and lines[0][6].startswith("-; ")
    once, twice = map(int, in_all.split(", "))
    assert twice - once > int(in_loops.split()[0]) > 10  # StepPrune's loop and its inner loop.


def test_the_next_run_reads_saved_results(card, capsys, tmp_path):
    flags = ["--target", "h200", "--program", "take", "--results", str(tmp_path / "results.jsonl")]
    assert command.main(flags) == 0
    first = capsys.readouterr().out
    card.compile = None  # All programs have results.
    assert command.main(flags) == 0
    assert capsys.readouterr().out == first
    (tmp_path / "results.jsonl").write_text("[]\n")
    assert status(command.NAME, command.main, *flags) == 2
    assert "results.jsonl, line 1: expected a JSON list of texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "cell", "failed"),
    [
        ("INVALID: Reshape | shapes\nmust", "FAILED: INVALID: Reshape / shapes must", True),
        ("RESOURCE_EXHAUSTED: Ran out of memory in hbm", "does not fit", False),
    ],
)
def test_a_program_that_fails_to_compile_has_a_row(card, capsys, reason, cell, failed):
    def fail(lowered):
        raise jax.errors.JaxRuntimeError(reason)

    card.compile = fail
    assert command.main(["--target", "h200", "--program", "take"]) == failed
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].endswith(f"| {cell} |")
    assert ("1 program(s) failed to compile" in err) == failed
