"""The benchmark of the language model compares equal logits with the reference."""

import pytest

from tools.bench import backbone

SMALL = ["--preset=tiny", "--length=8", "--batch=2", "--new_tokens=2", "--repeats=1", "--load_gb=0"]


def cells(output, start):
    """Returns the rows of the printed table whose first header begins with `start`, by column."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in output.splitlines()]
    header_index = next(index for index, line in enumerate(lines) if line[0].startswith(start))
    rows = [line for line in lines[header_index + 2 :] if len(line) == len(lines[header_index])]
    return [dict(zip(lines[header_index], line, strict=True)) for line in rows]


@pytest.mark.slow
def test_our_program_agrees_with_the_reference_in_the_timed_run(capsys):
    backbone.main([*SMALL, "--dtype", "float32", "--attention", "matmul", "xla"])
    output = capsys.readouterr().out
    prefill, decode = cells(output, "prefill"), cells(output, "decode")
    names = [row["program"] for row in prefill]
    assert names == ["matmul", "xla", "torch, dynamic cache", "torch, static cache"]
    assert decode[0]["program"] == "ours"
    for row in [*prefill[:2], decode[0]]:
        assert float(row["relative difference"]) < 1e-5
        assert float(row["fastest torch / this"]) > 0
    assert prefill[0]["MFU"] == "N/A"
