"""Writes the results of `stepprune_jax.efficiency` as a section of the documentation.

    python -m tools.bench.efficiency_page experiments/evidence/efficiency/*.json

Replaces the text between two marks of the page; without a page, prints the section.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepprune_jax.command_line import Parser, exit_with
from stepprune_jax.efficiency.timing import table

BEGIN, END = "<!-- efficiency: begin -->", "<!-- efficiency: end -->"
_PAPER = Path(__file__).parents[2] / "experiments" / "paper_tables.json"

_HEADER = [
    "row",
    "tokens kept",
    "TFLOPs",
    "traced",
    "tower",
    "encoder",
    "loop",
    "us a step",
    "projector",
    "prefill",
    "to the first token, ms",
    "ms a token",
    "cache, MB a row",
    "memory, GB",
    "times unpruned",
    "times transformers",
    "roofline, ms",
    "share",
    "compile, s",
]

_HEAD = """Time from pixels in host memory to the first token, with random weights, images and
prompts (`tools/bench/efficiency.py`):

* *tower*, *encoder* (of the selector), *loop* (the rest of the selector; *us a step* divides it by
  the tokens of the longest row), *projector* (including putting tokens in their places) and
  *prefill* are timed as separate programs, in ms.
* *to the first token* is what `generate` runs: one program, or two for a learned stop. Brackets
  have the minimum and maximum over the rounds. *times* columns are medians of the ratios within a
  round; above 1, the row is faster.
* *TFLOPs* are computed by formula for the tokens that are present, masked pairs included. *traced*
  counts the products of the programs, padding included and a loop of unknown length once.
* *memory* is what the compiler plans. *roofline* adds, for each stage, the longer of two times at
  the device's peaks, that of its operations and that of reading its weights. *share* is the
  roofline over the measured time."""


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """Formats results as Markdown."""
    return "\n\n".join([_HEAD, *_paper(), *(part for r in results for part in _device(r))])


def _paper() -> Iterator[str]:
    """Formats the paper's own figures."""
    paper = json.loads(_PAPER.read_text(encoding="utf-8"))
    rows = [
        [str(row[name]) for name in ("method", "tokens", "tflops", "latency_ms", "speed_up")]
        for row in paper["efficiency"]["rows"]
    ]
    header = ["the paper: LLaVA-1.5-7B, RTX A6000", "tokens", "TFLOPs", "prefill, ms", "speed-up"]
    yield f"The figures of {paper['source']}, none of which was measured here:"
    yield table(header, rows)


def _device(result: Mapping[str, Any]) -> Iterator[str]:
    """Formats the results of a model on a device, with a table for each batch."""
    about, peak, most = result["environment"], result["peak"], result.get("peak_bytes")
    yield f"### {result['model']}, {result['dtype']}, {about['device']}"
    yield (
        f"Commit {about['commit']}; {about['devices']} x {about['device']} ({about['platform']}), "
        f"driver {about['driver']}, {about['runtime']}; {about['processor']}, {about['cores']} "
        f"cores; jax {about['jax']}, Python {about['python']}, float32 products "
        f"{about['matmul_precision']}, flags: {about['flags']}. "
        f"{result['layers']} layers of width {result['width']}, {result['tokens']} tokens an image "
        f"and {result['text']} of text, policy of {result['decoder_layers']} decoder layer(s) in "
        f"{result['policy_dtype']}; {result['execution']}; {result['rounds']} rounds. Peaks: "
        f"{peak['flops'] / 1e12:.3g} TFLOP/s, {peak['bandwidth'] / 1e9:.3g} GB/s "
        f"({peak['source']})."
        + (f" At most {most / 1e9:.3g} GB were in use at a time." if most else "")
    )
    for batch, rows in result["batches"].items():
        yield f"Batch {batch}:"
        yield table(_HEADER, [_row(row) for row in rows])


def _row(row: Mapping[str, Any]) -> list[object]:
    """Returns the cells of a row; a reference has little more than times."""
    times, ratios = row["ms"], row["speed_up"]
    stages = {part: f"{spread[0]:.3g}" for part, spread in times.items()}
    cells = {name: "-" for name in _HEADER} | {
        "row": row["row"] + (f" (off by {row['difference']:.1g})" if "difference" in row else ""),
        "tower": stages.get("tower", "-"),
        "encoder": stages.get("encoder", "-"),
        "loop": stages.get("loop", stages.get("selector", "-")),
        "us a step": _step(row),
        "projector": stages.get("projector", "-"),
        "prefill": stages.get("prefill", "-"),
        "to the first token, ms": _spread(times["whole"]),
        "times unpruned": _spread(ratios["all"]) if "all" in ratios else "1",
        "times transformers": _spread(ratios["transformers"]) if "transformers" in ratios else "-",
    }
    if "kept" in row:
        mean, least, most = row["kept"]
        cells |= {
            "tokens kept": f"{mean:.4g}" + (f" ({least} to {most})" if least < most else ""),
            "TFLOPs": sum(row["tflops"].values()),
            "traced": row["traced_tflops"],
            "ms a token": _spread(times["decode"]),
            "cache, MB a row": row["cache_bytes"] / 1e6,
            "memory, GB": row["memory_bytes"] / 1e9,
            "roofline, ms": sum(row["roofline_ms"].values()),
            "share": f"{row['share']:.1%}",
            "compile, s": row["compile_s"],
        }
    return list(cells.values())


def _step(row: Mapping[str, Any]) -> str:
    """Returns the loop's microseconds per token of the longest row."""
    if "loop" not in row["ms"]:
        return "-"
    return f"{1e3 * row['ms']['loop'][0] / row['kept'][2]:.3g}"


def _spread(values: Sequence[float]) -> str:
    """Formats a median with minimum and maximum."""
    median, least, most = values
    return f"{median:.3g} ({least:.3g}, {most:.3g})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; reports user errors in one line and exits with status 2."""
    parser = Parser(prog="tools.bench.efficiency_page", description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="*", help="result files of the benchmark")
    parser.add_argument("--page", help="file whose marked part is replaced")
    flags = parser.parse_args(arguments)
    try:
        results = [json.loads(Path(name).read_text(encoding="utf-8")) for name in flags.results]
        text = section(results)
        if flags.page is None:
            print(text)
            return
        page = Path(flags.page)
        before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            parser.error(f"{page} has no marks {BEGIN} and {END}")
        page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
        print(f"wrote {page}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        parser.error(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    exit_with("tools.bench.efficiency_page", main)
