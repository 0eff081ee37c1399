"""The tables of the StepPrune paper as data, with their averages recomputed from their cells.

    python -m experiments.studies.paper_tables --out paper-tables.md

"Avg." is average retention: 100 x the unweighted mean over the benchmarks of score / upper bound.
A printed average does not follow if no scores that round to the printed ones give it.
"""

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.cli.command_line import Parser, exit_with
from stepprune_jax.evaluation.table import average_retention

DATA = Path(__file__).parents[1] / "paper_tables.json"


class PrintedRow(NamedTuple):
    """A method at one budget.

    Attributes:
        method: its name.
        scores: printed scores, one per benchmark.
        average: printed average in percent.
    """

    method: str
    scores: list[Decimal]
    average: Decimal


class PrintedTable(NamedTuple):
    """One model's results.

    Attributes:
        title: the model.
        benchmarks: names of the columns.
        upper_bound: scores of the model with all its tokens.
        blocks: rows by budget.
    """

    title: str
    benchmarks: list[str]
    upper_bound: list[Decimal]
    blocks: dict[str, list[PrintedRow]]


def read_paper() -> dict[str, Any]:
    """Reads the printed tables, whose numbers keep their decimals."""
    text = DATA.read_text(encoding="utf-8")
    paper = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    for number, table in enumerate(paper["retention"]):
        blocks = {
            block["label"]: [PrintedRow(**row) for row in block["rows"]]
            for block in table["blocks"]
        }
        paper["retention"][number] = PrintedTable(**(table | {"blocks": blocks}))
    return paper


def follows(row: PrintedRow, upper_bound: Sequence[Decimal]) -> bool:
    """Checks whether a printed average can come from the printed scores."""
    low = average_retention([s - _half(s) for s in row.scores], [u + _half(u) for u in upper_bound])
    high = average_retention(
        [s + _half(s) for s in row.scores], [u - _half(u) for u in upper_bound]
    )
    half = float(_half(row.average))
    return low <= float(row.average) + half and float(row.average) - half <= high


def page(paper: dict[str, Any]) -> str:
    """Formats the tables as a page."""
    sections = [
        _HEAD.format(source=paper["source"]),
        *(_retention(table) for table in paper["retention"]),
    ]
    first = paper["retention"][0]
    sections.append(_efficiency(paper["efficiency"], first))
    sections.append(_ablation(paper["ablation"], first))
    return "\n\n".join(sections) + "\n"


_HEAD = """# The paper's tables, recomputed

These are the figures as printed in {source}. All of them are the paper's; none was measured here.

"Avg." is 100 x the unweighted mean over the benchmarks of score / upper bound. A printed average
*follows* if some scores that round to the printed ones give an average that rounds to it. Scores
above the upper bound are in italics."""


def _half(value: Decimal) -> Decimal:
    """Returns half a unit of the last printed place."""
    return Decimal(5).scaleb(value.as_tuple().exponent - 1)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Formats a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _verdict(row: PrintedRow, upper_bound: Sequence[Decimal]) -> str:
    """Returns whether the printed average follows, or by how much it differs."""
    if follows(row, upper_bound):
        return "yes"
    return f"**no**, {float(row.average) - average_retention(row.scores, upper_bound):+.2f}"


def _retention(table: PrintedTable) -> str:
    """Formats all blocks of a model, and StepPrune's lead over the others on each benchmark."""
    header = ["kept", "method", *table.benchmarks, "Avg. printed", "Avg. recomputed", "follows"]
    rows = [["all", "upper bound", *table.upper_bound, "100", "100.00", "yes"]]
    leads, wrong, total = [], [], 0
    for label, block in table.blocks.items():
        for row in block:
            total += 1
            recomputed = average_retention(row.scores, table.upper_bound)
            verdict = _verdict(row, table.upper_bound)
            if verdict != "yes":
                wrong.append(f"{row.method} at {label}")
            cells = [
                f"*{s}*" if s > u else str(s)
                for s, u in zip(row.scores, table.upper_bound, strict=True)
            ]
            rows.append([label, row.method, *cells, row.average, f"{recomputed:.2f}", verdict])
        leads.append([label, *_lead(block, table.upper_bound)])
    verdict = f"All {total} printed averages follow."
    if wrong:
        verdict = f"{len(wrong)} of {total} printed averages do not follow: {', '.join(wrong)}."
    parts = [
        f"## {table.title}",
        _markdown(header, rows),
        verdict,
        "StepPrune's score minus the best of the other methods in its block, and the same for the "
        "recomputed average:",
        _markdown(["kept", *table.benchmarks, "Avg. recomputed"], leads),
    ]
    return "\n\n".join(parts)


def _lead(block: list[PrintedRow], upper_bound: list[Decimal]) -> list[str]:
    """Computes StepPrune's lead, benchmark by benchmark and in the recomputed average."""
    ours = next(row for row in block if row.method == "StepPrune")
    others = [row for row in block if row is not ours]
    leads = [
        f"{score - max(row.scores[column] for row in others):+}"
        for column, score in enumerate(ours.scores)
    ]
    best = max(average_retention(row.scores, upper_bound) for row in others)
    return [*leads, f"{average_retention(ours.scores, upper_bound) - best:+.2f}"]


def _efficiency(efficiency: dict[str, Any], table: PrintedTable) -> str:
    """Formats speed-ups from latencies, and averages from the table of results."""
    block = {row.method: row for row in table.blocks[efficiency["average_of"]]}
    slowest = efficiency["rows"][0]["latency_ms"]
    rows = []
    for row in efficiency["rows"]:
        scores = block[row["method"]].scores if row["method"] in block else table.upper_bound
        recomputed = [
            f"{slowest / row['latency_ms']:.2f}",
            f"{average_retention(scores, table.upper_bound):.2f}",
            _verdict(PrintedRow(row["method"], scores, row["average"]), table.upper_bound),
        ]
        rows.append([*row.values(), *recomputed])
    header = ["method", "tokens", "TFLOPs", "latency, ms", "speed-up", "Avg. printed"]
    header += ["speed-up recomputed", "Avg. recomputed", "follows"]
    title = f"## Prefill of {table.title}, {efficiency['average_of']}"
    return f"{title}\n\n{_markdown(header, rows)}"


def _ablation(ablation: dict[str, Any], table: PrintedTable) -> str:
    """Formats the ablations, and the same mean of benchmarks from the table of results."""
    rows, defaults = [], []
    for block in ablation["blocks"]:
        averages = {row["variant"]: row["average"] for row in block["rows"]}
        default = averages[block["default"]]
        defaults.append(default)
        for variant, average in averages.items():
            name = f"{variant} (default)" if variant == block["default"] else variant
            rows.append([block["label"], name, average, f"{average - default:+}"])
    columns = [table.benchmarks.index(name) for name in ablation["benchmarks"]]
    bounds = [table.upper_bound[column] for column in columns]
    means = []
    for label, block in table.blocks.items():
        ours = next(row for row in block if row.method == "StepPrune")
        scores = [ours.scores[column] for column in columns]
        verdicts = [_verdict(PrintedRow(label, scores, default), bounds) for default in defaults]
        means.append([label, f"{average_retention(scores, bounds):.2f}", *verdicts])
    names = ", ".join(ablation["benchmarks"])
    return "\n\n".join(
        [
            "## Ablations",
            f"The paper reports the average retention over {names}.",
            _markdown(["block", "variant", "Avg. printed", "minus default"], rows),
            f"The same mean for StepPrune's rows of {table.title}, and whether the printed "
            "defaults follow from it:",
            _markdown(["kept", f"mean over {names}", *(f"{d}" for d in defaults)], means),
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog="experiments.studies.paper_tables", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="paper-tables.md", help="file to write")
    arguments = parser.parse_args(argv)
    Path(arguments.out).write_text(page(read_paper()), encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    exit_with("experiments.studies.paper_tables", main)
