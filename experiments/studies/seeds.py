r"""Trains and evaluates every trained row on several seeds; means and standard deviations.

    python -m experiments.studies.seeds --config configs/shapes.py --workdir runs/seeds \
        --seeds 0 1 2 3 4 --rows default literal autoselect --processes 2

Each run is in WORKDIR/ROW-SEED. The same command resumes after an interruption. All trained rows
are evaluated; `--set eval.methods=all,random` selects the untrained rows.
`--set data.folder=FOLDER` names another data folder.
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

from experiments.datasets.scenes import read_scenes
from experiments.report.records import Records, accuracy_table, full_row, read_records
from experiments.report.statistics import stop_figures
from experiments.studies.processes import Job, run_jobs
from experiments.studies.spread import (
    budget_table,
    differences,
    learned_stop_table,
    pack,
    summarise,
)
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
from stepprune_jax.evaluation.cells import markdown_rows
from stepprune_jax.evaluation.generate_stage import Task, answer_tasks, load_model, read_sample
from stepprune_jax.evaluation.names import DEFAULT
from stepprune_jax.evaluation.rows import Conditions, TableRow
from stepprune_jax.evaluation.settings import (
    EvalSettings,
    EvaluationRun,
    check_policies,
)
from stepprune_jax.evaluation.split import Split, read_split
from stepprune_jax.selectors import Policy
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir.checkpoints import claim
from stepprune_jax.workdir.lock import locked

RESULTS = "results.json"


class Variant(NamedTuple):
    """A way to train a policy, which is a row of the table.

    Attributes:
        method: name in tables.
        argument: argument of the configuration file.
        changes: changes to the configuration, each "field=value".
        rate_factor: factor on the learning rates of the configuration.
    """

    method: str
    argument: str = ""
    changes: tuple[str, ...] = ()
    rate_factor: float = 1.0


# By name on the command line. The scorer has the text gate and the learning rates that serve it
# best (experiments/RESULTS.md).
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
    """Loads the configuration of a variant; `changes` of the command line come last."""
    variant = VARIANTS[key]
    path, variant_changes = f"{config}{variant.argument}", [*variant.changes]
    if variant.rate_factor != 1:
        optimizer = configurations.load(path, variant_changes).optimizer
        for name in ("lr", "final_lr", "muon_lr"):
            rate = variant.rate_factor * getattr(optimizer, name)
            variant_changes.append(f"optimizer.{name}={rate}")
    return configurations.load(path, [*variant_changes, *changes])


class Run(NamedTuple):
    """One training run.

    Attributes:
        key: its row on the command line.
        method: its row in tables.
        config: its configuration, with its seed.
        folder: its working directory.
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
    """Trains missing runs and evaluates."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="configuration, a name or a file")
    change = parser.add_argument("--set", nargs="+", default=[], dest="changes")
    change.metavar, change.help = "FIELD=VALUE", "fields to change, such as seed=1"
    parser.add_argument("--workdir", required=True, help="folder for runs, data and report")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rows", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    at_a_time = "runs trained at a time"
    parser.add_argument("--processes", type=integer_from(1), default=1, help=at_a_time)
    # For child processes: only train, on these processors.
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
    """Trains every row on every seed, unless already done, and evaluates all of them."""
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    workdir = Path(workdir).resolve()
    evaluation = configurations.load(config, changes)
    if not rows or len({*rows}) != len(rows) or not VARIANTS.keys() >= {*rows}:
        expected = f"distinct ones of {', '.join(VARIANTS)}"
        raise UserError(f"--rows is {list(rows)}, expected {expected}")
    planned = {key: variant_run(config, key, changes) for key in rows}
    # Child processes only write to the folders of their own runs.
    with contextlib.nullcontext() if train_only else locked(workdir):
        runs = plan(planned, workdir, seeds, _data(evaluation))
        if processes > 1 and not train_only:
            shared = ["--config", config, "--workdir", str(workdir), "--train_only"]
            shared += ["--set", *changes] if changes else []
            todo = [run for run in runs if not run.policy_file.is_file()]
            run_jobs([_job(run, shared) for run in todo], processes)
        else:
            for run in runs:
                _train(run)
        return {} if train_only else evaluate_runs(evaluation, workdir, runs)


def plan(
    variants: dict[str, training.Run], workdir: Path, seeds: Sequence[int], data: Path
) -> list[Run]:
    """Plans every run, seed by seed, all on the same data."""
    if not seeds or min(seeds) < 0 or len({*seeds}) != len(seeds):
        raise UserError(f"--seeds is {list(seeds)}, expected distinct non-negative numbers")
    runs, identity = [], file_identity(data / TRAIN_FILE)
    models: dict[Any, str] = {}
    for seed in seeds:
        for key, config in variants.items():
            settings = config.replace({"seed": seed, "data.folder": str(data)})
            run = Run(key, VARIANTS[key].method, settings, workdir / f"{key}-{seed}")
            place = settings.model.folders
            if place not in models:
                models[place] = model_identity(inspect_folder(*place))
            # Checked before training: a finished run with other settings must not be reused.
            claim(run.folder, settings, models[place], identity)
            runs.append(run)
    return runs


def _job(run: Run, shared: list[str]) -> Job:
    """Describes the run as a separate process."""
    run_flags = ["--rows", run.key, "--seeds", str(run.seed)]
    command = [sys.executable, "-m", "experiments.studies.seeds", *shared, *run_flags]
    return Job(run.folder.name, command, run.folder / "train.log", run.policy_file)


def _train(run: Run) -> None:
    """Trains one run in this process, unless it has finished."""
    if run.policy_file.is_file():
        return
    print(f"training {run.method}, seed {run.seed}, in {run.folder}", flush=True)
    training.train(run.config, run.folder)
    if not run.policy_file.is_file():
        raise UserError(f"{run.folder} holds no {POLICY_FILE}: training was interrupted")


def evaluate_runs(base: EvaluationRun, workdir: Path, runs: Sequence[Run]) -> dict[str, Any]:
    """Evaluates finished runs on one test split; existing results are kept."""
    settings, report = dataclasses.replace(base.eval, benchmarks=BENCHMARK.name), workdir / "report"
    base, test = dataclasses.replace(base, eval=settings), read_split(_data(base), "test")
    report.mkdir(parents=True, exist_ok=True)
    marks = [_mark(run, test, settings) for run in runs]
    first = Path(workdir) / "baselines" / RESULTS, _mark(None, test, settings)
    todo = [
        (run, mark)
        for run, mark in zip(runs, marks, strict=True)
        if _known(run.folder / RESULTS, mark) is None
    ]
    if todo or _known(*first) is None:
        _evaluate_missing(base, test, todo, first)
    tables = [_known(run.folder / RESULTS, mark) for run, mark in zip(runs, marks, strict=True)]
    result = {
        "seeds": sorted({run.seed for run in runs}),
        "questions": len(test.questions),
        "rows": summarise(_known(*first), tables),
        "differences": differences(tables),
    }
    write_json(report / "seeds.json", result)
    gaps = result["differences"]
    parts = [learned_stop_table(result["rows"]), budget_table(result["rows"])]
    if gaps:
        parts.append(markdown_rows(list(gaps[0]), [list(gap.values()) for gap in gaps]))
    parts = [part for part in parts if part]
    (report / "seeds.md").write_text("\n".join(parts), encoding="utf-8")
    print("\n".join(parts), end="")
    return result


class _Trained(Conditions):
    """Conditions of the rows with a policy alone."""

    def rows(self, biases: Biases) -> list[TableRow]:
        """Plans the rows of policies."""
        return [row for row in super().rows(biases) if row.policy is not None]


def _evaluate_missing(
    base: EvaluationRun,
    test: Split,
    todo: Sequence[tuple[Run, str]],
    first: tuple[Path, str],
) -> None:
    """Evaluates runs without results, and untrained rows if needed; saves each at once."""
    settings = base.eval
    model, source = load_model(base), base.model.inspect()
    policies = {run.folder: load_policy(run.policy_file) for run, _ in todo}
    for run, _ in todo:
        check_policies({run.method: policies[run.folder]}, model.config, settings)
    ids = [question.question_id for question in test.questions]
    file = _data(base) / "test_scenes.jsonl"
    scenes = read_scenes(file, test.questions) if file.is_file() else None

    def records(
        path: Path,
        mark: str,
        seed: int,
        policies: dict[str, Policy],
        stops: tuple[str, ...] = (),
    ) -> list[Records]:
        # A folder for each mark: answers of an earlier policy, or of eval.py, stay out of it.
        folder = path.parent / f"{ANSWERS}_{mark}"
        # What `methods` leaves out are rows without training.
        chosen = (
            dataclasses.replace(settings, methods="", learned_stops=stops) if policies else settings
        )
        run = dataclasses.replace(base, seed=seed, eval=chosen)
        conditions = (_Trained if policies else Conditions)(run, source, policies, folder)
        sample = read_sample(run, BENCHMARK.name) if stops else None
        task = Task(conditions, BENCHMARK, run.questions(BENCHMARK.name), sample)
        answer_tasks([task], lambda: model)
        labels = [*settings.labels, *policies]
        return read_records(folder / BENCHMARK.name, _data(base), labels, ids)

    path, mark = first
    untrained = records(path, mark, base.seed, {})
    if _known(path, mark) is None:
        _save(path, mark, _table(untrained, untrained, base.seed))
    for run, mark in todo:
        print(f"evaluating {run.method}, seed {run.seed}", flush=True)
        path = run.folder / RESULTS
        policy = policies[run.folder]
        stops = (run.method,) if policy.has_stop else ()
        trained = records(path, mark, run.seed, {run.method: policy}, stops)
        table = _table(trained, untrained, run.seed)
        if policy.has_stop:
            n = model.config.max_image_tokens
            bounds = policy.config.min_tokens, policy.config.steps(n)
            stops = [stop_figures(row, scenes, *bounds) for row in trained]
            table = [row | stop for row, stop in zip(table, stops, strict=True)]
        _save(path, mark, table)


def _data(base: EvaluationRun) -> Path:
    """Returns the folder of the questions."""
    return base.root(BENCHMARK.name)


def _table(
    rows: Sequence[Records], untrained: Sequence[Records], seed: int
) -> list[dict[str, Any]]:
    """Builds the `accuracy_table` of some rows, with the correctness of each answer."""
    table = accuracy_table([full_row(untrained), *rows], seed)[1:]
    return [line | {"correct": pack(row.correct)} for line, row in zip(table, rows, strict=True)]


def _mark(run: Run | None, test: Split, settings: EvalSettings) -> str:
    """Hashes everything that determines a result: questions, settings and the policy's bytes."""
    pairs = zip(test.questions, test.answers, strict=True)
    parts = [f"{question.image.name} {question.text} {answer}" for question, answer in pairs]
    free = {"rows": {}, "batch_size": 1}
    if run is not None:
        free["methods"] = ""
    parts.append(repr(dataclasses.replace(settings, **free)))
    if run is not None:
        parts.append(hashlib.sha256(run.policy_file.read_bytes()).hexdigest())
    return digest(parts)


def _known(path: Path, mark: str) -> list[dict[str, Any]] | None:
    """Returns a saved table, if it has the same questions, settings and policy."""
    if not path.is_file():
        return None
    saved = read_json_object(path)
    return saved["table"] if saved["mark"] == mark else None


def _save(path: Path, mark: str, table: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"mark": mark, "table": table})


if __name__ == "__main__":
    exit_with("experiments.studies.seeds", main)
