"""The report on the shapes world and data folders in its format: tables and statistics."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import AnswerFile, digest
from stepprune_jax.benchmarks.answers import read_answers
from stepprune_jax.checkpoints.folder import Source, load_tokenizer
from stepprune_jax.checkpoints.frozen import model_source
from stepprune_jax.data.json_files import write_json
from stepprune_jax.data.llava import Question
from stepprune_jax.evaluation import report as reports
from stepprune_jax.evaluation.accuracy import (
    accuracy_by_family,
    accuracy_table,
    full_row,
    write_accuracy,
)
from stepprune_jax.evaluation.names import ALL, row_place
from stepprune_jax.evaluation.operations import (
    mean_flops,
    prompt_lengths,
    pruner_of,
    row_policies,
)
from stepprune_jax.evaluation.records import RECORDS, Records, save_records, trimmed
from stepprune_jax.evaluation.scores import mean_ms
from stepprune_jax.evaluation.settings import DEFAULT, SHAPES, EvaluationRun
from stepprune_jax.evaluation.split import read_split
from stepprune_jax.evaluation.statistics import make_statistics
from stepprune_jax.models.images import stack_images
from stepprune_jax.user_input import user_input


def write_report(
    run: EvaluationRun,
    files: Sequence[AnswerFile],
    data: Path,
    report: Path,
    *,
    policy: Path | None = None,
    ask: str | None = None,
) -> list[dict[str, Any]]:
    """Writes the report of a run from its answer files.

    Args:
        run: the settings of the run.
        files: complete answer files, in the order of the table.
        data: folder with the test split.
        policy: file of the default row's policy, whose operations are counted; None if missing.
        ask: a command that asks the policy a question, for the page.
        report: folder to write to: table.{json,md,csv}, table_by_family.{json,md},
            statistics.json, records/ and report.json, which `visualize.redraw` reads.

    Returns:
        The table: objects with method, mode, pruning_rate, accuracy and retention (percent),
        mean_k, ms, gflops (both None if unknown), questions and seed.
    """
    test, source = read_split(data, "test"), model_source(run)
    records = [read_records(file, data, test.questions) for file in files]
    mean = round(float(full_row(records).count.mean()))
    # Where the policy stops by itself no budget says what share of an image that is.
    records = [row if row.budget else row._replace(num_tokens=mean) for row in records]
    grids = image_grids(source, [question.image for question in test.questions])
    costs = _costs(run, files, records, test.questions, grids, source, policy)
    table = accuracy_table(records, run.seed, costs)
    reports.write_manifest(report, {})  # no longer that of an earlier, finished report
    write_accuracy(report, table, accuracy_by_family(records, test.questions))
    statistics = make_statistics(records, test.questions, test.scenes, DEFAULT)
    write_json(report / "statistics.json", statistics)
    save_records(report / RECORDS, records)
    facts = {
        "data": reports.relative(data, report),
        "questions": digest([f"{q.image.name} {q.text}" for q in test.questions]),
        **_grid_facts(test.questions, grids),
        "seed": run.seed,
        "model": str(source.folder),
        "model_name": files[0].provenance.model,
        "ask": ask,
        "settings": {name: _plain(value) for name, value in dataclasses.asdict(run.eval).items()},
        "stop_biases": _stop_biases(files, records),
        "device": jax.devices()[0].device_kind,
    }
    metrics = report.parent / "metrics.jsonl"
    if metrics.is_file():
        facts["metrics_file"] = reports.relative(metrics, report)
    reports.write_manifest(report, facts)
    return table


@user_input()
def image_grids(source: Source, images: Sequence[Path]) -> Int[np.ndarray, "q 2"]:
    """Measures images in rows and columns of visual tokens.

    Args:
        source: the model's folder.
        images: files, some of them perhaps more than once.

    Returns:
        The grid of each.

    Raises:
        FileNotFoundError: an image is missing.
        ValueError: an image that the model cannot take.
    """
    config, family = source.config, source.config.family
    pixels = family.pixel_cache(
        config, family.image_settings(source.vision_folder or source.folder), 0
    )
    distinct = list(dict.fromkeys(images))
    # One that stands for all where they have one size.
    looked = distinct if config.sizes_vary else distinct[:1]
    found = [family.grids(config, stack_images([pixels(image)]))[0] for image in looked]
    grids = dict(zip(distinct, found * (len(distinct) // len(looked)), strict=True))
    return np.array([grids[image] for image in images])


@user_input()
def read_records(file: AnswerFile, data: Path, questions: Sequence[Question]) -> Records:
    """Reads the kept tokens and answers of a row, and scores them.

    Args:
        file: the complete answer file.
        data: folder with the correct answers.
        questions: questions of the test split.

    Returns:
        The row's records.

    Raises:
        ValueError: a line is not the answer to the question in its place.
    """
    provenance = file.provenance
    lines = read_answers(file.path)
    if [line.id for line in lines] != [question.question_id for question in questions]:
        raise ValueError(
            f"{file.path} does not answer the questions of {data} one by one: run the stage "
            "generate again, which sorts its lines, or move the file away"
        )
    count = np.array([line.fields["kept"] for line in lines], np.int32)
    order = np.full((len(lines), max(1, int(count.max(initial=0)))), -1, np.int32)
    for row, line in zip(order, lines, strict=True):
        whole = range(line.fields["kept"]) if provenance.method == ALL else ()
        kept = line.fields.get("order", whole)
        row[: len(kept)] = kept
    return Records(
        method=provenance.method,
        mode=provenance.mode,
        budget=provenance.budget,
        num_tokens=provenance.num_tokens,
        count=count,
        order=trimmed(order, count),
        answer=[line.text for line in lines],
        correct=np.array(BENCHMARKS[SHAPES].judge(data, file.path), bool),
    )


def in_table_order(files: Sequence[AnswerFile], labels: Sequence[str]) -> list[AnswerFile]:
    """Sorts answer files in the order of the table.

    Args:
        files: files of one benchmark.
        labels: labels of methods, in the order of the table.

    Returns:
        The files, ordered by `names.row_place`.
    """

    def place(file: AnswerFile) -> tuple[Any, ...]:
        provenance = file.provenance
        return row_place(provenance.method, provenance.mode, provenance.budget, labels)

    return sorted(files, key=place)


def _costs(
    run: EvaluationRun,
    files: Sequence[AnswerFile],
    records: Sequence[Records],
    questions: Sequence[Question],
    grids: Int[np.ndarray, "q 2"],
    source: Source,
    policy: Path | None,
) -> list[dict[str, float | None]]:
    """Returns the mean time per answer of each row, and the operations up to its first token."""
    tokenizer = load_tokenizer(source.folder)
    lengths = prompt_lengths(tokenizer, source.config, [question.text for question in questions])
    costs = []
    policies = row_policies(run.eval, files, policy)
    for file, row, trained in zip(files, records, policies, strict=True):
        pruner = pruner_of(file.provenance, trained)
        ms, gflops = mean_ms(read_answers(file.path)), None
        if pruner is not None:
            flops = mean_flops(source.config, pruner, lengths, row.count, grids)
            gflops = float(f"{flops / 1e9:.4g}")
        costs.append({"ms": None if ms is None else round(ms, 3), "gflops": gflops})
    return costs


def _grid_facts(questions: Sequence[Question], grids: Int[np.ndarray, "q 2"]) -> dict[str, Any]:
    """The grid of all images, or that of each by its name."""
    if not np.ptp(grids, axis=0).any():
        return {"grid": grids[0].tolist()}
    return {"grids": {q.image.name: g for q, g in zip(questions, grids.tolist(), strict=True)}}


def _stop_biases(files: Sequence[AnswerFile], records: Sequence[Records]) -> dict[str, float]:
    """Returns the stop bias of each adaptive row."""
    return {
        f"{row.method}, {row.pruning_rate:g}": round(file.provenance.stop_bias, 4)
        for file, row in zip(files, records, strict=True)
        if file.provenance.stop_bias is not None
    }


def _plain(value: Any) -> Any:
    """Converts a value to a JSON value."""
    return dict(value) if hasattr(value, "keys") else value
