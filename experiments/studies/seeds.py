r"""Trains and evaluates rows of a table on several seeds, and prints means and deviations.

    python -m experiments.studies.seeds --config configs/shapes.py --workdir runs/seeds \
        --seeds 0 1 2 3 4 --rows default literal autoselect --processes 2

The folder of a run is WORKDIR/ROW-SEED. The same command resumes after an interruption.
`--set eval.methods=all,random` selects rows without training, and `--set data.folder=FOLDER`
selects another data folder.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.shapes.scene_files import read_scenes
from experiments.studies.answers import (
    RowAnswers,
    accuracy_table,
    full_row,
    read_row_answers,
    stop_statistics,
)
from experiments.studies.processes import Job, run_jobs
from experiments.studies.spread import budget_table, learned_stop_table, summarize
from stepprune_jax import configurations, training
from stepprune_jax.benchmarks.answer_files import ANSWERS, digest
from stepprune_jax.benchmarks.folder import BENCHMARK
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.identity import file_identity, model_identity
from stepprune_jax.checkpoints.policy import POLICY_FILE, load_policy
from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.data.json_files import read_json_object, write_json
from stepprune_jax.data.source import TRAIN_FILE
from stepprune_jax.evaluation.calibrate import Biases
from stepprune_jax.evaluation.generate_stage import Task, answer_tasks, load_model, read_sample
from stepprune_jax.evaluation.names import DEFAULT
from stepprune_jax.evaluation.rows import Conditions, TableRow
from stepprune_jax.evaluation.settings import EvalSettings, EvaluationRun, check_policies
from stepprune_jax.evaluation.split import Split, read_split
from stepprune_jax.selectors import Policy
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir.checkpoints import claim
from stepprune_jax.workdir.lock import locked

RESULTS = "results.json"


class Variant(NamedTuple):
    """A way to train a policy: one row of the table.

    Attributes:
        method: name of the row.
        argument: argument of the configuration, such as ":literal".
        changes: changes to the configuration, each "field=value".
        rate_factor: factor on the learning rates of the configuration.
    """

    method: str
    argument: str = ""
    changes: tuple[str, ...] = ()
    rate_factor: float = 1.0


# Variants by their names on the command line. The scorer has the text gate and the learning rates
# with its best results (experiments/RESULTS.md).
VARIANTS = {
    "default": Variant(DEFAULT),
    "literal": Variant("StepPrune literal", ":literal"),
    "autoselect": Variant(
        "AutoSelect-like",
        changes=("method=autoselect", "text_gate_anneal=0.1"),
        rate_factor=0.5,
    ),
}


def variant_run(config: str, key: str, changes: Sequence[str]) -> training.Run:
    """Loads the configuration of a variant.

    Args:
        config: name or file of a configuration.
        key: a key of `VARIANTS`.
        changes: changes of the command line, which override the variant's changes.
    """
    variant = VARIANTS[key]
    path, variant_changes = f"{config}{variant.argument}", [*variant.changes]
    if variant.rate_factor != 1:
        run = configurations.load(path, variant_changes)
        group, rates = "optimizer", run.optimizer
        if run.recipe == "rloo":
            group, rates = "rloo", run.resolve_rloo()
        for name in ("lr", "final_lr", "muon_lr"):
            rate = variant.rate_factor * getattr(rates, name)
            variant_changes.append(f"{group}.{name}={rate}")
    return configurations.load(path, [*variant_changes, *changes])


class Run(NamedTuple):
    """One training run.

    Attributes:
        key: a key of `VARIANTS`.
        method: name of the row in tables.
        config: configuration, including the seed.
        folder: folder of the run.
    """

    key: str
    method: str
    config: training.Run
    folder: Path

    @property
    def seed(self) -> int:
        """Seed of the training run."""
        return self.config.seed

    @property
    def policy_file(self) -> Path:
        """The file that training writes at its end."""
        return self.folder / POLICY_FILE


def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="configuration, a name or a file")
    change = parser.add_argument("--set", nargs="+", default=[], dest="changes")
    change.metavar, change.help = "FIELD=VALUE", "fields to change, such as seed=1"
    parser.add_argument("--workdir", required=True, help="folder for runs, data and report")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rows", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    text = "number of runs to train in parallel"
    parser.add_argument("--processes", type=integer_from(1), default=1, help=text)
    # Flags of child processes, which only train, on some of the processors.
    parser.add_argument("--train_only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cpus", type=int, nargs="+", help=argparse.SUPPRESS)
    run_seeds(**vars(parser.parse_args(argv)))


def run_seeds(
    config: str,
    workdir: str | Path,
    seeds: Sequence[int],
    rows: Sequence[str],
    *,
    processes: int = 1,
    changes: Sequence[str] = (),
    train_only: bool = False,
    cpus: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Trains the missing runs of every row and seed, and evaluates all runs.

    Args:
        config: name or file of a configuration.
        workdir: folder of the runs and the report.
        seeds: seeds of training.
        rows: keys of `VARIANTS`.
        processes: number of runs to train in parallel.
        changes: changes to the configuration, each "field=value".
        train_only: whether to skip the evaluation, as child processes do.
        cpus: processors of this process; None uses all.

    Returns:
        The content of report/seeds.json; empty with `train_only`.
    """
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    workdir = Path(workdir).resolve()
    evaluation = configurations.load(config, changes)
    if not rows or len({*rows}) != len(rows) or not VARIANTS.keys() >= {*rows}:
        expected = f"distinct ones of {', '.join(VARIANTS)}"
        raise UserError(f"--rows is {list(rows)}, expected {expected}")
    configs = {key: variant_run(config, key, changes) for key in rows}
    # Child processes write only to the folders of their runs, which the parent has locked.
    with contextlib.nullcontext() if train_only else locked(workdir):
        runs = plan_runs(configs, workdir, seeds, _data(evaluation))
        if processes > 1 and not train_only:
            shared_flags = ["--config", config, "--workdir", str(workdir), "--train_only"]
            shared_flags += ["--set", *changes] if changes else []
            untrained = [run for run in runs if not run.policy_file.is_file()]
            run_jobs([_job(run, shared_flags) for run in untrained], processes)
        else:
            for run in runs:
                _train(run)
        return {} if train_only else evaluate_runs(evaluation, workdir, runs)


def plan_runs(
    variants: dict[str, training.Run], workdir: Path, seeds: Sequence[int], data: Path
) -> list[Run]:
    """Plans a run for each seed and variant, and claims the folders of the runs.

    Raises:
        UserError: seeds are invalid, or a folder has a run with other settings.
    """
    if not seeds or min(seeds) < 0 or len({*seeds}) != len(seeds):
        raise UserError(f"--seeds is {list(seeds)}, expected distinct non-negative numbers")
    runs, identity = [], file_identity(data / TRAIN_FILE)
    models: dict[Any, str] = {}
    for seed in seeds:
        for key, config in variants.items():
            settings = config.replace({"seed": seed, "data.folder": str(data)})
            run = Run(key, VARIANTS[key].method, settings, workdir / f"{key}-{seed}")
            model_folders = settings.model.folders
            if model_folders not in models:
                models[model_folders] = model_identity(inspect_folder(*model_folders))
            # Fails here, before training, if a finished run has other settings.
            claim(run.folder, settings, models[model_folders], identity)
            runs.append(run)
    return runs


def _job(run: Run, shared_flags: list[str]) -> Job:
    """Returns the job that trains a run in another process."""
    run_flags = ["--rows", run.key, "--seeds", str(run.seed)]
    command = [sys.executable, "-m", "experiments.studies.seeds", *shared_flags, *run_flags]
    return Job(run.folder.name, command, run.folder / "train.log", run.policy_file)


def _train(run: Run) -> None:
    """Trains a run in this process, unless it has finished."""
    if run.policy_file.is_file():
        return
    print(f"training {run.method}, seed {run.seed}, in {run.folder}", flush=True)
    training.train(run.config, run.folder)
    if not run.policy_file.is_file():
        raise UserError(
            f"{run.folder} has no {POLICY_FILE}: training was interrupted; run the command again"
        )


def evaluate_runs(base: EvaluationRun, workdir: Path, runs: Sequence[Run]) -> dict[str, Any]:
    """Evaluates finished runs on the test split, except for runs with saved results."""
    settings, report = dataclasses.replace(base.eval, benchmarks=BENCHMARK.name), workdir / "report"
    base, test = dataclasses.replace(base, eval=settings), read_split(_data(base), "test")
    report.mkdir(parents=True, exist_ok=True)
    fingerprints = [_fingerprint(run, test, settings) for run in runs]
    baseline = workdir / "baselines" / RESULTS, _fingerprint(None, test, settings)
    pairs = list(zip(runs, fingerprints, strict=True))
    missing = [pair for pair in pairs if _saved_table(pair[0].folder / RESULTS, pair[1]) is None]
    if missing or _saved_table(*baseline) is None:
        _evaluate_missing(base, test, missing, baseline)
    tables = [_saved_table(run.folder / RESULTS, fingerprint) for run, fingerprint in pairs]
    result = {
        "seeds": sorted({run.seed for run in runs}),
        "questions": len(test.questions),
        "rows": summarize(_saved_table(*baseline), tables),
    }
    write_json(report / "seeds.json", result)
    parts = [learned_stop_table(result["rows"]), budget_table(result["rows"])]
    parts = [part for part in parts if part]
    (report / "seeds.md").write_text("\n".join(parts), encoding="utf-8")
    print("\n".join(parts), end="")
    return result


class _TrainedConditions(Conditions):
    """Conditions that plan only the rows with a policy."""

    def rows(self, biases: Biases) -> list[TableRow]:
        """Plans the rows of policies."""
        return [row for row in super().rows(biases) if row.policy is not None]


def _evaluate_missing(
    base: EvaluationRun,
    test: Split,
    missing: Sequence[tuple[Run, str]],
    baseline: tuple[Path, str],
) -> None:
    """Evaluates runs without saved results, and saves the result of each run.

    Args:
        base: model, data and settings of the evaluation.
        test: the test split.
        missing: runs to evaluate, with their fingerprints.
        baseline: file and fingerprint of the rows without training.
    """
    settings = base.eval
    model, source = load_model(base), base.model.inspect()
    policies = {run.folder: load_policy(run.policy_file) for run, _ in missing}
    num_tokens = model.config.max_image_tokens
    for run, _ in missing:
        check_policies({run.method: policies[run.folder]}, model.config, settings, num_tokens)
    ids = [question.question_id for question in test.questions]
    file = _data(base) / "test_scenes.jsonl"
    scenes = read_scenes(file, test.questions) if file.is_file() else None

    def answer_rows(
        path: Path,
        fingerprint: str,
        seed: int,
        policies: dict[str, Policy],
        stops: tuple[str, ...] = (),
    ) -> list[RowAnswers]:
        # The name separates these answers from answers of an earlier policy or of eval.py.
        folder = path.parent / f"{ANSWERS}_{fingerprint}"
        # Rows of policies are added to `methods`, which here has no rows without training.
        changes = {"methods": "", "learned_stops": stops} if policies else {}
        run_settings = dataclasses.replace(settings, **changes)
        run = dataclasses.replace(base, seed=seed, eval=run_settings)
        conditions = (_TrainedConditions if policies else Conditions)(run, source, policies, folder)
        sample = read_sample(run, BENCHMARK.name) if stops else None
        task = Task(conditions, BENCHMARK, run.questions(BENCHMARK.name), sample)
        answer_tasks([task], lambda: model)
        labels = [*settings.labels, *policies]
        return read_row_answers(folder / BENCHMARK.name, _data(base), labels, ids)

    path, fingerprint = baseline
    untrained = answer_rows(path, fingerprint, base.seed, {})
    if _saved_table(path, fingerprint) is None:
        _save(path, fingerprint, _table(untrained, untrained, base.seed))
    for run, fingerprint in missing:
        print(f"evaluating {run.method}, seed {run.seed}", flush=True)
        path = run.folder / RESULTS
        policy = policies[run.folder]
        stops = (run.method,) if policy.has_stop else ()
        trained = answer_rows(path, fingerprint, run.seed, {run.method: policy}, stops)
        table = _table(trained, untrained, run.seed)
        if policy.has_stop:
            bounds = policy.config.min_tokens, policy.config.steps(num_tokens)
            statistics = [stop_statistics(row, scenes, *bounds) for row in trained]
            table = [row | extra for row, extra in zip(table, statistics, strict=True)]
        _save(path, fingerprint, table)


def _data(base: EvaluationRun) -> Path:
    """Returns the folder of the questions."""
    return base.root(BENCHMARK.name)


def _table(
    rows: Sequence[RowAnswers], untrained: Sequence[RowAnswers], seed: int
) -> list[dict[str, Any]]:
    """Returns the `accuracy_table` of rows. The untrained rows have the reference of retention."""
    return accuracy_table([full_row(untrained), *rows], seed)[1:]


def _fingerprint(run: Run | None, test: Split, settings: EvalSettings) -> str:
    """Returns a hash of everything that determines a result: questions, settings and policy."""
    pairs = zip(test.questions, test.answers, strict=True)
    parts = [f"{question.image.name} {question.text} {answer}" for question, answer in pairs]
    irrelevant = {"rows": {}, "batch_size": 1}
    if run is not None:
        irrelevant["methods"] = ""
    parts.append(repr(dataclasses.replace(settings, **irrelevant)))
    if run is not None:
        parts.append(hashlib.sha256(run.policy_file.read_bytes()).hexdigest())
    return digest(parts)


def _saved_table(path: Path, fingerprint: str) -> list[dict[str, Any]] | None:
    """Returns a saved table, or None if there is none with this fingerprint."""
    if not path.is_file():
        return None
    saved = read_json_object(path)
    return saved["table"] if saved["mark"] == fingerprint else None


def _save(path: Path, fingerprint: str, table: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"mark": fingerprint, "table": table})


if __name__ == "__main__":
    exit_with("experiments.studies.seeds", main)
