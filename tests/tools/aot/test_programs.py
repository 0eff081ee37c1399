"""The programs that a user runs, and the table of what compiles."""

import dataclasses
import json

import jax
import pytest
from jax.sharding import Mesh

from stepprune_jax import testing
from stepprune_jax.command_line import one_line_errors
from stepprune_jax.parallel import targets
from stepprune_jax.parallel.sharding import build_mesh
from tools.aot import __main__ as command
from tools.aot.programs import ROWS, Programs, load_run, model_of

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
    run = load_run("configs/shapes.py")
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
def test_programs_of_a_tiny_model_compile_here(tmp_path):
    """On the CPU: what the table lists are programs, not only traces."""
    mesh = build_mesh("data", jax.devices()[:2])
    programs = Programs(tiny(tmp_path), mesh, "float32")
    names = {"statistics", "prefill cut", "decode cut", "select 2", "select own 2", "answer 2"}
    for name in sorted(names):
        traced = programs.trace(name)
        assert traced.lower().compile().memory_analysis().argument_size_in_bytes > 0, name


@pytest.mark.slow
def test_programs_of_a_model_whose_images_differ_in_size_are_traced(tmp_path):
    run = tiny(tmp_path)
    model = dataclasses.replace(run.model, folder=str(testing.tiny_qwen(tmp_path / "qwen")))
    policy = dataclasses.replace(run.policy, max_steps=None)
    programs = Programs(dataclasses.replace(run, model=model, policy=policy), build_mesh(), "mixed")
    for name in ("tower", "rank", "prefill", "prefill cut", "decode", "select own 2", "answer 2"):
        assert programs.trace(name).jaxpr, name


def test_fields_of_a_configuration_are_changed():
    run = load_run("configs/qwen25vl_7b.py", ["model.max_pixels=3211264", "batch_size=4"])
    assert run.batch_size == 4 and model_of(run).max_image_tokens == 4096
    with pytest.raises(ValueError, match="most_pixels is not a field"):
        load_run("configs/qwen25vl_7b.py", ["model.most_pixels=1"])
    assert command.parse(["--set", "batch_size=4", "seed=1"]).set == ["batch_size=4", "seed=1"]


def test_a_selector_without_a_stop_is_asked_for_counts_alone(tmp_path):
    run = load_run("configs/shapes.py", ["method=autoselect"])
    run = dataclasses.replace(run, model=tiny(tmp_path).model)
    assert set(Programs(run, build_mesh(), "float32").names()) == TRAINING | ANSWERING | SELECT


@pytest.fixture
def cpu_target(monkeypatch):
    """A target whose devices are virtual CPUs of the name of a card."""

    class Device:
        def __init__(self, device):
            self.device, self.device_kind = device, "NVIDIA H200"

    class Target(targets.Target):
        def compile(self, lowered):
            return lowered.compile()

    def make(name):
        targets.read_name(name)
        return Target(name, tuple(map(Device, jax.devices()[:1])), {})

    def mesh(preset, devices) -> Mesh:
        return build_mesh(preset, [device.device for device in devices])

    monkeypatch.setattr(command, "make_target", make)
    monkeypatch.setattr(command, "build_mesh", mesh)
    return Target


def test_the_table_has_a_line_for_each_program(cpu_target, capsys):
    assert command.main(["--target", "h200", "--program", "take", "policy.pick 1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    cells = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [row[:5] for row in cells] == [
        ["h200", "1", "configs/shapes.py", "float32", program]
        for program in ("take", "policy.pick 1")
    ]
    assert [row[-1] for row in cells] == ["ok", "ok"]
    assert cells[0][6] == "-" and int(cells[1][6].split()[0]) > 10  # the pointer's loop


def test_a_program_that_configurations_share_is_compiled_once(cpu_target, capsys, monkeypatch):
    calls, compile_once = [], cpu_target.compile
    monkeypatch.setattr(
        cpu_target, "compile", lambda *given: calls.append(given) or compile_once(*given)
    )
    configs = [command.SHAPES, f"{command.SHAPES}:literal"]
    flags = ["--target", "h200", "--config", *configs, "--program", "take", "policy.pick 1"]
    assert command.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 4 and len(calls) == 3
    assert lines[2].endswith(f"| 0 | ok (as {command.SHAPES}, float32) |")
    assert lines[0].split(" | ")[5:7] == lines[2].split(" | ")[5:7]
    assert lines[3].endswith("| ok |")  # the stop of the literal reading is another


def test_results_are_kept_for_the_next_run(cpu_target, capsys, monkeypatch, tmp_path):
    flags = ["--target", "h200", "--program", "take", "--results", str(tmp_path / "results.jsonl")]
    assert command.main(flags) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(cpu_target, "compile", None)  # there is nothing left to compile
    assert command.main(flags) == 0
    assert capsys.readouterr().out == first
    (tmp_path / "results.jsonl").write_text("[]\n")
    with pytest.raises(SystemExit), one_line_errors(command.NAME):
        command.main(flags)
    assert "results.jsonl, line 1: expected a result" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "cell", "status"),
    [
        (
            "INVALID_ARGUMENT: Reshape | shapes\nmust be the same",
            "FAILED: INVALID_ARGUMENT: Reshape / shapes must be the same",
            1,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in hbm", "does not fit", 0),
    ],
)
def test_what_does_not_compile_is_a_line(cpu_target, capsys, monkeypatch, reason, cell, status):
    def fail(self, lowered):
        raise jax.errors.JaxRuntimeError(reason)

    monkeypatch.setattr(cpu_target, "compile", fail)
    assert command.main(["--target", "h200", "--program", "take"]) == status
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].endswith(f"| {cell} |")
    assert ("1 program(s) failed to compile" in err) == bool(status)
