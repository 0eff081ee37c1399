"""The programs that a user runs, and the table of what compiles."""

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
    """Configurations are named from the repository's root, and import each other."""
    monkeypatch.chdir(pytestconfig.rootpath)
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath))


def tiny(tmp_path):
    """The run of the shapes world with a model of a few weights."""
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
def test_every_program_has_the_dtypes_that_were_asked_for(tmp_path):
    mesh = build_mesh("data", jax.devices()[:2])
    programs = Programs(tiny(tmp_path), mesh, "mixed")
    assert set(programs.names()) == ALL
    for name in programs.names():
        dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(programs.trace(name).in_avals)}
        # The frozen model's weights and features; the policy alone is float32 here.
        assert ("bfloat16" in dtypes) != (name in PICK), name
        learned = name in PICK | TRAINING - {"validation"} or name.startswith(("select", "rank"))
        assert not learned or "float32" in dtypes, name


@pytest.mark.slow
def test_programs_of_a_model_whose_images_differ_in_size_are_traced(tmp_path):
    run = tiny(tmp_path)
    model = dataclasses.replace(run.model, folder=str(tiny_qwen(tmp_path / "qwen")))
    policy = dataclasses.replace(run.policy, max_steps=None)
    programs = Programs(dataclasses.replace(run, model=model, policy=policy), build_mesh(), "mixed")
    for name in ("tower", "rank", "prefill", "prefill cut", "decode", "select own 2", "answer 2"):
        assert programs.trace(name).jaxpr, name


def test_fields_of_a_configuration_are_changed():
    changes = command.parse(["--set", "model.max_pixels=3211264"]).groups[0].changes
    run = configurations.load("configs/qwen25vl_7b.py", changes)
    assert backbone_of(run).config.max_image_tokens == 4096


def test_a_selector_without_a_stop_is_asked_for_counts_alone(tmp_path):
    run = configurations.load("configs/shapes.py", ["method=autoselect"])
    run = dataclasses.replace(run, model=tiny(tmp_path).model)
    assert set(Programs(run, build_mesh(), "float32").names()) == TRAINING | ANSWERING | SELECT


@pytest.fixture
def card(monkeypatch):
    """A CPU in place of a card, with what it has compiled."""
    target = types.SimpleNamespace(devices=jax.devices()[:1], given=[])

    def compile_here(lowered):
        target.given.append(lowered)
        return lowered.compile()

    target.compile = compile_here
    monkeypatch.setattr(command, "make_target", lambda name: target)
    monkeypatch.setattr(command, "known_as", lambda kind: "h200")
    return target


def test_a_line_for_each_program_and_what_configurations_share_is_compiled_once(card, capsys):
    configs = [command.SHAPES, f"{command.SHAPES}:literal"]
    flags = ["--target", "h200", "--config", *configs, "--program", "take", "policy.pick 1"]
    assert command.main(flags) == 0
    lines = [x.strip("| ").split(" | ") for x in capsys.readouterr().out.splitlines()[2:]]
    assert [line[:5] for line in lines] == [
        ["h200", "1", config, "float32", program]
        for config in configs
        for program in ("take", "policy.pick 1")
    ]
    assert len(card.given) == 3 and lines[2][-2:] == ["0", f"ok (as {command.SHAPES}, float32)"]
    # The stop of the literal reading is another.
    assert lines[0][-1] == lines[1][-1] == lines[3][-1] == "ok"
    in_loops, _, in_all = lines[1][6].partition("; ")
    assert lines[0][6] == lines[2][6] and lines[0][6].startswith("-; ")
    once, twice = map(int, in_all.split(", "))
    assert twice - once > int(in_loops.split()[0]) > 10  # StepPrune's loop, and the one in it


def test_results_are_kept_for_the_next_run(card, capsys, tmp_path):
    flags = ["--target", "h200", "--program", "take", "--results", str(tmp_path / "results.jsonl")]
    assert command.main(flags) == 0
    first = capsys.readouterr().out
    card.compile = None  # there is nothing left to compile
    assert command.main(flags) == 0
    assert capsys.readouterr().out == first
    (tmp_path / "results.jsonl").write_text("[]\n")
    assert status(command.NAME, command.main, *flags) == 2
    assert "results.jsonl, line 1: expected a result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "cell", "failed"),
    [
        ("INVALID: Reshape | shapes\nmust", "FAILED: INVALID: Reshape / shapes must", True),
        ("RESOURCE_EXHAUSTED: Ran out of memory in hbm", "does not fit", False),
    ],
)
def test_what_does_not_compile_is_a_line(card, capsys, reason, cell, failed):
    def fail(lowered):
        raise jax.errors.JaxRuntimeError(reason)

    card.compile = fail
    assert command.main(["--target", "h200", "--program", "take"]) == failed
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].endswith(f"| {cell} |")
    assert ("1 program(s) failed to compile" in err) == failed
