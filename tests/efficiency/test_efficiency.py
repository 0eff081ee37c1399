"""The table of efficiency: measured at a tiny size, written to a page, bad input refused."""

import json
import re

import pytest

from stepprune_jax import testing
from stepprune_jax.efficiency import __main__ as efficiency
from stepprune_jax.efficiency import peaks
from stepprune_jax.efficiency.model_shapes import model_config
from stepprune_jax.flops import llm_flops
from stepprune_jax.models.llava.config import LlavaConfig
from tools.bench import efficiency_page

N, TEXT = 16, 8
FIELDS = testing.tiny_hf_config(vision={"num_attention_heads": 2, "image_size": 32})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(FIELDS))
    return str(path)


@pytest.fixture(scope="module")
def result(model, tmp_path_factory):
    """Two rows at batch 2, one turn, and `transformers`."""
    out = tmp_path_factory.mktemp("out") / "result.json"
    flags = ["--model", model, "--json", str(out), "--rows", "stepprune@mean:4", "--batch", "2"]
    flags += ["--text", str(TEXT), "--new_tokens", "2", "--rounds", "1", "--transformers"]
    flags += ["--decoder_layers", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficiency, "device_peak", lambda dtype: peaks.Peak(1e9, 1e9, "made up"))
        efficiency.main(flags)
    return json.loads(out.read_text())


@pytest.mark.slow
def test_rows_are_measured_in_turns(result):
    whole, own, theirs = result["batches"]["2"]
    assert [row["row"] for row in (whole, own, theirs)] == [
        "all",
        "stepprune@mean:4",
        "transformers",
    ]
    assert whole["kept"] == [N, N, N] and own["kept"][0] == pytest.approx(4, abs=0.5)
    assert (whole["programs"], own["programs"]) == (1, 2)
    for row in (whole, own):
        assert {"tower", "selector", "projector", "prefill", "whole", "decode"} <= set(row["ms"])
        assert all(least <= median <= most for median, least, most in row["ms"].values())
        assert row["memory_bytes"] > 0 and row["cache_bytes"] > 0
    # One turn: the ratio is that of its two times.
    ratio = whole["ms"]["whole"][0] / own["ms"]["whole"][0]
    assert own["speed_up"]["all"] == pytest.approx([ratio] * 3)
    assert set(whole["speed_up"]) == {"transformers"} and set(theirs["speed_up"]) == {"all"}
    assert theirs["difference"] < 1e-5  # the same model, on the same inputs


@pytest.mark.slow
def test_qwen_is_compared_with_the_reference(tmp_path):
    fields = testing.tiny_qwen_config(testing.qwen_tokenizer(), max_position_embeddings=4096)
    model, out = tmp_path / "config.json", tmp_path / "result.json"
    model.write_text(json.dumps(fields))
    flags = ["--model", str(model), "--json", str(out), "--rows", "all", "--batch", "2"]
    flags += ["--text", str(TEXT), "--new_tokens", "2", "--rounds", "1", "--transformers"]
    efficiency.main([*flags, "--tokens", "225"])
    whole, theirs = json.loads(out.read_text())["batches"]["2"]
    assert whole["kept"][0] == 225 and whole["tflops"]["projector"] > 0
    assert theirs["row"] == "transformers" and theirs["difference"] < 1e-5


def test_images_of_qwen_are_square(capsys):
    flags = ["--model", "qwen-mid", "--json", "no.json", "--rows", "all", "--tokens", "230"]
    with pytest.raises(SystemExit):
        efficiency.main(flags)
    assert "--tokens is 230, expected a square number from 225" in capsys.readouterr().err


@pytest.mark.slow
def test_operations_are_those_of_the_tokens_that_are_there(result):
    whole, own, _ = result["batches"]["2"]
    text = LlavaConfig.from_hf(FIELDS).text
    kept = round(own["kept"][0])
    for row, count in ((whole, N), (own, kept)):
        assert row["tflops"]["prefill"] == 2e-12 * llm_flops(text, TEXT + count).flops
    assert whole["tflops"]["selector"] == 0 < own["tflops"]["selector"]
    assert whole["tflops"]["tower"] == own["tflops"]["tower"]
    roofline = sum(own["roofline_ms"].values())
    assert own["share"] == pytest.approx(roofline / own["ms"]["whole"][0])


@pytest.mark.slow
def test_results_become_a_section_of_a_page(result, tmp_path):
    results, page = tmp_path / "result.json", tmp_path / "page.md"
    results.write_text(json.dumps(result))
    page.write_text(f"before\n{efficiency_page.BEGIN}\nold\n{efficiency_page.END}\nafter\n")
    for _ in range(2):  # a second time changes nothing
        efficiency_page.main([str(results), "--page", str(page)])
        text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    ours = next(row for row in rows if row[0] == "| stepprune@mean:4")
    median = result["batches"]["2"][1]["speed_up"]["all"][0]
    assert f"{median:.3g} (" in ours[efficiency_page._HEADER.index("times unpruned")]
    assert "arXiv 2606.16067" in text and "| StepPrune | 64 | 2.28 | 79.5 | 1.88 |" in text


@pytest.mark.slow
def test_a_page_without_marks_is_refused(result, tmp_path, capsys):
    results, page = tmp_path / "result.json", tmp_path / "page.md"
    results.write_text(json.dumps(result))
    page.write_text("text")
    with pytest.raises(SystemExit):
        efficiency_page.main([str(results), "--page", str(page)])
    assert "has no marks" in capsys.readouterr().err and page.read_text() == "text"


BAD = {
    "pruner": (["--rows", "clss@4"], "unknown pruner 'clss'.*Did you mean cls"),
    "budget": (["--rows", "cls@99"], "budget is 99, expected at most 16"),
    "no budget": (["--rows", "cls"], "the pruner 'cls' needs a budget"),
    "kind": (["--rows", "cls@mean:4"], "cls does not support the budget mean:4"),
    "model": (["--model", "llava-8b"], "'llava-8b' is neither a file nor one of llava-7b"),
    "rounds": (["--rounds", "0"], "argument --rounds: '0' is not an integer from 1"),
    "batch": (["--batch", "0"], "argument --batch: '0' is not an integer from 1"),
    "memory": (
        ["--model", "llava-13b", "--transformers"],
        r"--model llava-13b in float32 at --batch 8 needs 11\d\.\d GB at least, and cpu has 9.0 GB "
        "free: choose --model mid or --dtype bfloat16 or a smaller --batch or no --transformers or",
    ),
    "torch": (["--transformers"], "--transformers needs torch: pip install it"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_allocated(case, model, tmp_path, capsys, patched):
    flags, message = BAD[case]
    if case == "torch":
        patched.setattr(efficiency, "find_spec", lambda name: None if name == "torch" else name)
    given = ["--model", model, "--json", str(tmp_path / "o.json"), "--rows", "cls@4", *flags]
    with pytest.raises(SystemExit) as stopped:
        efficiency.main(given)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


@pytest.fixture
def patched(monkeypatch):
    """Little memory, and no way to fill it."""
    monkeypatch.setattr(efficiency, "free_memory", lambda: 9e9)
    monkeypatch.setattr(efficiency, "random_weights", None)
    return monkeypatch


def test_peaks_are_those_of_a_data_sheet_or_measured():
    peak = peaks.device_peak("float32", side=64, nbytes=1 << 16)
    assert peak.flops > 0 and peak.bandwidth > 0 and "64 x 64" in peak.source
    bound = peaks.Peak(flops=10.0, bandwidth=2.0, source="")
    assert bound.seconds(100, 2) == 10 and bound.seconds(10, 8) == 4


def test_the_default_rows_are_the_papers_budgets_as_far_as_they_can_be_kept(capsys):
    config = model_config("mid")
    rows = efficiency.default_rows(config)
    assert rows[0] == "all" and {"cls@192", "fastv@128", "stepprune@64"} <= set(rows)
    assert {"stepprune@mean:192", "stepprune@mean:128", "stepprune@mean:64"} <= set(rows)
    assert "pyramiddrop@192" in rows and "pyramiddrop@64" not in rows  # of 24 layers
    assert "pyramiddrop@64 is left out: " in capsys.readouterr().err
    made = efficiency.read_rows(rows, config, 1, "float32")
    assert [row.name for row in made] == rows and len({*rows}) == len(rows)
