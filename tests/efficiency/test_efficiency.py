"""The table of efficiency: measured at a tiny size, written to a page, bad input refused."""

import contextlib
import io
import json

import jax
import pytest
from commands import status

from stepprune_jax import testing
from stepprune_jax.cli import efficiency
from stepprune_jax.efficiency import measure
from stepprune_jax.efficiency import rows as rows_of
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.flops import llm_flops
from stepprune_jax.models.llava.config import LlavaConfig

N, TEXT = 16, 8
FIELDS = testing.tiny_hf_config(vision={"num_attention_heads": 2, "image_size": 32})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(FIELDS))
    return str(path)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Two rows at batch 2, one turn: the results, and what was printed."""
    out = tmp_path_factory.mktemp("out") / "result.json"
    flags = ["--model", model, "--json", str(out), "--rows", "stepprune@mean:4", "all"]
    flags += ["--text", str(TEXT), "--new_tokens", "2", "--rounds", "1", "--decoder_layers", "1"]
    flags += ["--batch", "2", "--first_answer"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert efficiency.main(flags) == 0
    result = json.loads(out.read_text())
    return result["batches"]["2"], said.getvalue(), result["first_answer"]


@pytest.mark.slow
def test_rows_are_measured_in_turns(made):
    (whole, own), said, _ = made
    assert [row["row"] for row in (whole, own)] == ["all", "stepprune@mean:4"]
    assert whole["kept"] == [N, N, N] and own["kept"][0] == pytest.approx(4, abs=0.5)
    for row in (whole, own):
        assert all(least <= median <= most for median, least, most in row["ms"].values())
        assert row["cache_bytes"] > 0 and row["working_bytes"] > row["cache_bytes"]
        assert row["kernels"] is None  # no CPU counts them
    # One turn: the ratio is that of its two times.
    ratio = own["ms"]["whole_baseline"][0] / own["ms"]["whole"][0]
    assert own["speed_up"] == pytest.approx([ratio] * 3) and whole["speed_up"] == [1, 1, 1]
    line = next(line for line in said.splitlines() if line.startswith("| stepprune@mean:4"))
    assert f"| {ratio:.3g} (" in line


@pytest.mark.slow
def test_a_second_process_finds_the_programs_of_the_first(made):
    _, said, (first, second) = (*made[:2], made[2].values())
    compiling = "compiling for the whole answer"
    assert 0 < second[compiling] < first[compiling]
    assert said.count("first token of a process, ") == 2


@pytest.mark.slow
def test_operations_are_those_of_the_tokens_that_are_there(made):
    whole, own = made[0]
    text = LlavaConfig.from_hf(FIELDS).text
    kept = round(own["kept"][0])
    for row, count in ((whole, N), (own, kept)):
        assert row["tflops"]["prefill"] == 2e-12 * llm_flops(text, TEXT + count).flops
    assert whole["tflops"]["choice"] == 0 < own["tflops"]["choice"]
    assert whole["tflops"]["tower"] == own["tflops"]["tower"]


@pytest.mark.slow
def test_a_row_that_fails_costs_no_other(model, tmp_path, monkeypatch, capsys):
    measured, out = measure.measure, tmp_path / "result.json"

    def failing(bench, base, row, batch):
        if len(batch.prompts.length) == 2:  # the baseline, too: no ratios
            assert base is None or row is base
            if row.name == "all":
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: for two")
        elif row.name == "grid@4":  # what was measured before is in the file
            (saved,) = json.loads(out.read_text())["batches"]["1"]
            assert saved["row"] == "all"
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand so on")
        elif row.name == "grid@8":
            raise TypeError("a bug")
        return measured(bench, base, row, batch)

    monkeypatch.setattr(measure, "measure", failing)
    rows = ["grid@4", "grid@8", "cls@4", "all"]
    flags = ["--model", model, "--json", str(out), "--rows", *rows, "--batch", "2", "1"]
    run = [*flags, "--text", str(TEXT), "--new_tokens", "1", "--rounds", "1"]
    assert efficiency.main(run) == 1
    result = json.loads(out.read_text())
    assert [row["row"] for row in result["batches"]["1"]] == ["all", "cls@4"]
    assert [row["row"] for row in result["batches"]["2"]] == ["grid@4", "grid@8", "cls@4"]
    assert not any(row["speed_up"] for row in result["batches"]["2"])
    assert result["left_out"]["all, batch 2"] == "JaxRuntimeError: RESOURCE_EXHAUSTED: for two"
    said = capsys.readouterr()
    assert "grid@4 is left out: JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory\n" in said.err
    assert "grid@8 is left out: TypeError: a bug\n" in said.err and "in failing\n" in said.err
    one = said.out[said.out.index("batch 1") :].splitlines()
    assert [line.split(" | ")[0] for line in one[2:6]] == ["| row", "| ---", "| all", "| cls@4"]
    assert one[5].split(" | ")[11] != "-" == said.out.splitlines()[4].split(" | ")[11]


@pytest.fixture
def no_weights(monkeypatch):
    """Nothing can be allocated."""
    monkeypatch.setattr(efficiency, "random_weights", None)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows", "clss@4"], "unknown pruner 'clss'"),
        (["--rows", "grid@4 group"], "--rows: 'group', expected KEY=VALUE"),
        (["--rows", "cls@99"], "budget is 99, expected at most 16"),
        (["--json", "/"], "--json is '/', expected a file"),
        (["--model", "llava-8b"], "'llava-8b' is neither"),
        (["--weights", "int4"], "argument --weights: invalid choice: 'int4' (choose from "),
        (["--model", "qwen-mid", "--tokens", "230"], "--tokens is 230, expected a square number"),
    ],
)
def test_bad_input_is_refused_before_anything_is_allocated(flags, message, model, tmp_path, capsys):
    given = ["--model", model, "--json", str(tmp_path / "o.json"), "--rows", "grid@4", *flags]
    assert status("efficiency", efficiency.main, *given) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


@pytest.mark.usefixtures("no_weights")
def test_a_dry_run_counts_what_the_paper_has_for_all_tokens(capsys):
    names = ["all", "visionzip@64", "stepprune@64", "stepprune@288", "stepprune"]
    how = ["--dtype", "bfloat16", "--weights", "int8"]
    efficiency.main(["--model", "llava-7b", "--dry_run", "--rows", *names, *how])
    header, _, *rows, most, own, weights = capsys.readouterr().out.strip().splitlines()
    assert header.startswith("| row | tower, TFLOPs | choice, TFLOPs | projector, TFLOPs | prefill")
    assert rows[0] == "| all | 0.366 | 0 | 0.0242 | 8.5 | 8.89 |"
    assert [row.split(" | ")[-1] for row in rows[1:]] == ["2.04 |", "2.08 |"]
    assert own.split(" | ")[3:5] == most.split(" | ")[3:5]  # its own stop: up to T_max
    # 6.61e9 numbers in a byte each, .46e9 in two, and the scales in 6 MB.
    assert weights == "weights in bfloat16, int8: 7.01 GiB"
    with pytest.raises(SystemExit):
        efficiency.main(["--model", "llava-7b"])
    assert "required: --json, or --dry_run" in capsys.readouterr().err


def test_the_default_rows_are_the_papers_budgets_as_far_as_they_can_be_kept(capsys):
    config = find_backbone("mid").config
    rows = rows_of.default_rows(config)
    assert rows[0] == "all" and {"cls@192", "fastv@128", "stepprune@64"} <= set(rows)
    assert {"stepprune@mean:192", "stepprune@mean:128", "stepprune@mean:64"} <= set(rows)
    assert "pyramiddrop@192" in rows and "pyramiddrop@64" not in rows  # of 24 layers
    assert "pyramiddrop@64 is left out: " in capsys.readouterr().err
    made = rows_of.read_rows(rows, config, 1, "float32")
    assert [row.name for row in made] == rows and len({*rows}) == len(rows)
    (grouped,) = rows_of.read_rows(["stepprune@64 group=4"], config, 1, "float32")
    assert grouped.pruner.group == 4
