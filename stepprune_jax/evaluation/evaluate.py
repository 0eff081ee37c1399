"""The whole evaluation of a run: every method on every question, tables and statistics."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from stepprune_jax.benchmarks.answer_files import ANSWERS, digest
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation import measure
from stepprune_jax.evaluation import report as report_folder
from stepprune_jax.evaluation.accuracy import (
    accuracy_by_family,
    accuracy_table,
    markdown_table,
    write_accuracy,
)
from stepprune_jax.evaluation.names import DEFAULT
from stepprune_jax.evaluation.records import RECORDS, Records, save_records
from stepprune_jax.evaluation.rows import Row, grid_shape
from stepprune_jax.evaluation.settings import (
    Settings,
    check_policies,
    load_policies,
    own_policy,
    read_settings,
)
from stepprune_jax.evaluation.sources import load_model, split_folders
from stepprune_jax.evaluation.split import Split, read_split, thin
from stepprune_jax.evaluation.statistics import make_statistics
from stepprune_jax.user_input import user_input


def evaluate(
    config: Any,
    workdir: str | Path,
    *,
    policy: str | Path | None = None,
    command: str | None = None,
) -> list[dict[str, Any]]:
    """Compares the policy of a run with all tokens, with heuristics and with other policies.

    Stop biases are calibrated on the validation split, everything is measured on the test split.
    Writes workdir/answers/shapes, an answer file a row, from which the rows are scored, and
    workdir/report: table.{json,md,csv}, table_by_family.{json,md}, statistics.json, records/,
    report.json, and the figures and index.html of `visualize.redraw`; prints the table.

    Args:
        config: the run's `ConfigDict`; for the group `eval` see `settings.Settings`.
        workdir: folder of the run, with policy.safetensors.
        policy: another policy file, or folder of a run, for the default row.
        command: the command that this is, for the page.

    Returns:
        The table: objects with method, mode, pruning_rate, accuracy and retention (percent),
        mean_k, questions and seed.

    Raises:
        FileNotFoundError: a policy, the model or data are missing.
        ValueError: bad settings, policies that do not fit the model, bad data, or a report folder
            that holds something else.
    """
    begin = time.monotonic()
    workdir = Path(workdir)
    with user_input():
        settings = read_settings(config)
        policies = load_policies(settings, own_policy(workdir, policy))
        report = report_folder.open_folder(workdir / "report")
        report_folder.write_manifest(report, {})  # no longer that of an earlier, finished report
        places = split_folders(config, workdir)
        test = read_split(places["test"], "test")
        validation = calibration_split(places["validation"], policies, settings)
        model = load_model(config)
        check_policies(policies, model.config, settings)
    files = measure.Files(workdir / ANSWERS, places["test"])
    bench = measure.make_bench(model, test, validation, settings, files, config.model.attention)
    rows = all_rows(bench, policies, config.seed)
    records = measure.answer_rows(bench, rows)
    facts = {
        "data": report_folder.relative(places["test"], report),
        "questions": digest([f"{q.image.name} {q.text}" for q in test.questions]),
        "grid": grid_shape(model.config),
        "seed": config.seed,
        "model": str(model.folder),
        "seconds": round(time.monotonic() - begin, 1),
    }
    metrics = workdir / "metrics.jsonl"
    if metrics.is_file():
        facts["metrics_file"] = report_folder.relative(metrics, report)
    facts |= describe(settings, rows)
    table = write_results(report, records, test, config.seed, facts)
    print(markdown_table(table), end="")
    # Imported here: drawing reads what is written here, and needs what nothing else does.
    from stepprune_jax.visualize import redraw

    page = redraw(report, command=command)
    seconds = time.monotonic() - begin
    print(f"{len(test.questions)} questions, {len(rows)} rows in {seconds:.0f} s: {page}")
    return table


def describe(settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    """Settings, the stop biases that were found, and the device, as JSON has them."""
    biases = {
        f"{row.method}, {row.pruning_rate:g}": round(row.stop_bias, 4)
        for row in rows
        if row.stop_bias is not None
    }
    plain = {name: _plain(value) for name, value in settings._asdict().items()}
    return {"settings": plain, "stop_biases": biases, "device": jax.devices()[0].device_kind}


def calibration_split(
    folder: Path, policies: dict[str, Policy], settings: Settings
) -> Split | None:
    """The validation split, thinned out, if a row needs it."""
    if not any(measure.stops(name, policy, settings) for name, policy in policies.items()):
        return None
    return thin(read_split(folder, "validation"), settings.validation_questions)


def all_rows(bench: measure.Bench, policies: dict[str, Policy], seed: int) -> list[Row]:
    """Rows in the order of the table: untrained, other policies, the default, ablations."""
    trained = measure.trained_rows(bench, policies)
    rows = measure.baseline_rows(bench, seed)
    return rows + [row for name in policies for row in trained[name]]


def write_results(
    report: Path, records: list[Records], test: Split, seed: int, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Writes tables, statistics, records and the manifest; returns the table."""
    table = accuracy_table(records, seed)
    write_accuracy(report, table, accuracy_by_family(records, test.questions))
    statistics = make_statistics(records, test.questions, test.scenes, DEFAULT)
    write_json(report / "statistics.json", statistics)
    save_records(report / RECORDS, records)
    report_folder.write_manifest(report, facts)
    return table


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    return dict(value) if hasattr(value, "keys") else value
