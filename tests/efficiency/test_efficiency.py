"""The efficiency table: measured at a tiny size; invalid input is refused."""

import contextlib
import io
import json

import jax
import pytest
from commands import status

from stepprune_jax import testing
from stepprune_jax.cli import efficiency
from stepprune_jax.efficiency import measure
from stepprune_jax.efficiency import rows as bench
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
def results(model, tmp_path_factory):
    """Returns two rows at batch 2 with one round: their results, the output, and first answers."""
    out = tmp_path_factory.mktemp("out") / "result.json"
    flags = ["--model", model, "--json", str(out), "--rows", "stepprune@mean:4", "all"]
    flags += ["--text", str(TEXT), "--new_tokens", "2", "--rounds", "1", "--decoder_layers", "1"]
    flags += ["--batch", "2", "--first_answer"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert efficiency.main(flags) == 0
    result = json.loads(out.read_text())
    return result["batches"]["2"], printed.getvalue(), result["first_answer"]


@pytest.mark.slow
def test_rows_alternate_with_the_row_of_all_tokens(results):
    (all_tokens, pruned), printed, _ = results
    assert [row["row"] for row in (all_tokens, pruned)] == ["all", "stepprune@mean:4"]
    assert all_tokens["kept"] == [N, N, N] and pruned["kept"][0] == pytest.approx(4, abs=0.5)
    for row in (all_tokens, pruned):
        assert all(minimum <= median <= maximum for median, minimum, maximum in row["ms"].values())
        assert row["cache_bytes"] > 0 and row["working_bytes"] > row["cache_bytes"]
        assert row["kernels"] is None  # CPUs do not count kernels.
    # With one round, the ratio is the ratio of two times.
    ratio = pruned["ms"]["whole_baseline"][0] / pruned["ms"]["whole"][0]
    assert pruned["speed_up"] == pytest.approx([ratio] * 3) and all_tokens["speed_up"] == [1, 1, 1]
    line = next(line for line in printed.splitlines() if line.startswith("| stepprune@mean:4"))
    assert f"| {ratio:.3g} (" in line


@pytest.mark.slow
def test_a_second_process_reads_the_programs_of_the_first(results):
    _, printed, (first, second) = (*results[:2], results[2].values())
    field = "compiling for the whole answer"
    assert 0 < second[field] < first[field]
    assert printed.count("first token of a process, ") == 2


@pytest.mark.slow
def test_operations_do_not_count_padding(results):
    all_tokens, pruned = results[0]
    text = LlavaConfig.from_hf(FIELDS).text
    kept = round(pruned["kept"][0])
    for row, count in ((all_tokens, N), (pruned, kept)):
        assert row["tflops"]["prefill"] == 2e-12 * llm_flops(text, TEXT + count).flops
    assert all_tokens["tflops"]["choice"] == 0 < pruned["tflops"]["choice"]
    assert all_tokens["tflops"]["tower"] == pruned["tflops"]["tower"]


@pytest.mark.slow
def test_a_row_that_fails_does_not_affect_other_rows(model, tmp_path, monkeypatch, capsys):
    measure_row, out = measure.measure, tmp_path / "result.json"

    def failing(bench, base, row, batch):
        if len(batch.prompts.length) == 2:  # The baseline fails, so there are no ratios.
            assert base is None or row is base
            if row.name == "all":
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: for two")
        elif row.name == "grid@4":  # The file has the rows before this one.
            (saved_row,) = json.loads(out.read_text())["batches"]["1"]
            assert saved_row["row"] == "all"
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand so on")
        elif row.name == "grid@8":
            raise TypeError("a bug")
        return measure_row(bench, base, row, batch)

    monkeypatch.setattr(measure, "measure", failing)
    rows = ["grid@4", "grid@8", "cls@4", "all"]
    flags = ["--model", model, "--json", str(out), "--rows", *rows, "--batch", "2", "1"]
    command = [*flags, "--text", str(TEXT), "--new_tokens", "1", "--rounds", "1"]
    assert efficiency.main(command) == 1
    result = json.loads(out.read_text())
    assert [row["row"] for row in result["batches"]["1"]] == ["all", "cls@4"]
    assert [row["row"] for row in result["batches"]["2"]] == ["grid@4", "grid@8", "cls@4"]
    assert not any(row["speed_up"] for row in result["batches"]["2"])
    assert result["left_out"]["all, batch 2"] == "JaxRuntimeError: RESOURCE_EXHAUSTED: for two"
    captured = capsys.readouterr()
    exhausted = "grid@4 is left out: JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory\n"
    for text in (exhausted, "grid@8 is left out: TypeError: a bug\n", "in failing\n"):
        assert text in captured.err
    first_table = captured.out[captured.out.index("batch 1") :].splitlines()
    names = [line.split(" | ")[0] for line in first_table[2:6]]
    assert names == ["| row", "| ---", "| all", "| cls@4"]
    assert first_table[5].split(" | ")[11] != "-" == captured.out.splitlines()[4].split(" | ")[11]


@pytest.fixture
def no_weights(monkeypatch):
    """Makes an allocation of weights fail."""
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
        (["--frames", "4"], "expected no value: this model reads images only"),
    ],
)
def test_invalid_input_is_refused_before_weights_are_allocated(
    flags, message, model, tmp_path, capsys
):
    command = ["--model", model, "--json", str(tmp_path / "o.json"), "--rows", "grid@4", *flags]
    assert status("efficiency", efficiency.main, *command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


@pytest.mark.usefixtures("no_weights")
def test_a_dry_run_prints_operations_and_the_size_of_the_weights(capsys):
    names = ["all", "visionzip@64", "stepprune@64", "stepprune@288", "stepprune"]
    flags = ["--dtype", "bfloat16", "--weights", "int8"]
    efficiency.main(["--model", "llava-7b", "--dry_run", "--rows", *names, *flags])
    header, _, *rows, fixed_count, by_stop, weights = capsys.readouterr().out.strip().splitlines()
    assert header.startswith("| row | tower, TFLOPs | choice, TFLOPs | projector, TFLOPs | prefill")
    assert rows[0] == "| all | 0.366 | 0 | 0.0242 | 8.5 | 8.89 |"
    assert [row.split(" | ")[-1] for row in rows[1:]] == ["2.04 |", "2.08 |"]
    # A learned stop keeps up to T_max.
    assert by_stop.split(" | ")[3:5] == fixed_count.split(" | ")[3:5]
    # 6.61e9 numbers of one byte, 0.46e9 numbers of two bytes, and scales of 6 MB.
    assert weights == "weights in bfloat16, int8: 7.01 GiB"
    with pytest.raises(SystemExit):
        efficiency.main(["--model", "llava-7b"])
    assert "required: --json, or --dry_run" in capsys.readouterr().err


def test_the_default_rows_have_the_papers_budgets_that_are_possible(capsys):
    config = find_backbone("mid").config
    rows = bench.default_rows(config)
    assert rows[0] == "all" and {"cls@192", "fastv@128", "stepprune@64"} <= set(rows)
    assert {"stepprune@mean:192", "stepprune@mean:128", "stepprune@mean:64"} <= set(rows)
    assert "pyramiddrop@192" in rows and "pyramiddrop@64" not in rows  # The model has 24 layers.
    assert "pyramiddrop@64 is left out: " in capsys.readouterr().err
    bench_rows = bench.read_rows(rows, config, 1, "float32")
    assert [row.name for row in bench_rows] == rows and len({*rows}) == len(rows)
    (grouped,) = bench.read_rows(["stepprune@64 group=4"], config, 1, "float32")
    assert grouped.pruner.group == 4


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-8b"])
def test_operations_of_a_video_are_those_of_its_temporal_patches(name, capsys):
    def count(*flags):
        rows = ["--rows", "all", *(["evs@10%"] if flags else [])]
        efficiency.main(["--model", name, "--tokens", "256", "--dry_run", *rows, *flags])
        lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
        return {cells[0].strip("| "): [*map(float, cells[1:5])] for cells in lines[2:-1]}

    image, short, long = count(), count("--frames", "15"), count("--frames", "64")
    # Two frames are one temporal patch, which the tower encodes as an image.
    assert short["all"][0] == pytest.approx(8 * image["all"][0], rel=0.01)
    assert long["all"][0] == pytest.approx(32 * image["all"][0], rel=0.01)
    assert short["all"][3] < long["all"][3] / 4
    assert long["evs@10%"][3] < 0.2 * long["all"][3]
