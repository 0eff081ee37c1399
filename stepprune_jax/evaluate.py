"""Evaluates policies: `stepprune-eval --config shapes --workdir runs/shapes`.

There are three stages, run in turn or singly (`--stages`). *generate* turns model and question
files into answer files; once interrupted, it resumes with the unanswered questions. *convert* turns
answer files into the formats of official programs and servers. *score* turns answer files and
annotations into the report. The shapes world is one of the benchmarks;
`--config.eval.benchmarks=pope,mme` names others. Any field of the configuration can be set by a
flag; `--config.data.folder=FOLDER` asks the questions of another folder.
"""

import contextlib
import os
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from stepprune_jax import command_line
from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import AnswerFile, questions_digest, read_files
from stepprune_jax.data.llava import read_questions
from stepprune_jax.evaluation import report as report_folder
from stepprune_jax.evaluation.accuracy import markdown_table
from stepprune_jax.evaluation.generate_stage import (
    answers_folder,
    generate_answers,
    public_questions,
)
from stepprune_jax.evaluation.names import ALL, DEFAULT, OWN_STOP
from stepprune_jax.evaluation.scores import score_answers
from stepprune_jax.evaluation.settings import (
    SHAPES,
    EvalSettings,
    EvaluationRun,
    own_policy,
    read_evaluation,
)
from stepprune_jax.evaluation.shapes_report import in_table_order, write_report
from stepprune_jax.evaluation.sources import split_folders
from stepprune_jax.evaluation.table import NAME, as_markdown, merge_scores, write_table
from stepprune_jax.parallel import distributed
from stepprune_jax.pruning import Budget
from stepprune_jax.user_input import local_path, one_line, user_input
from stepprune_jax.workdir.lock import locked

STAGES = ("generate", "convert", "score")
SUBMISSIONS = "submissions"


def evaluate(
    run: EvaluationRun,
    workdir: str | Path,
    *,
    stages: Sequence[str] = STAGES,
    policy: str | Path | None = None,
    command: str | None = None,
) -> None:
    """Evaluates a run on the benchmarks that its configuration names.

    Args:
        run: the settings of the run.
        workdir: folder of the run. Answers go to workdir/answers/BENCHMARK, files for official
            programs to workdir/submissions/BENCHMARK, tables and figures to workdir/report.
        stages: the stages to run, of `STAGES`.
        policy: a policy file, or the folder of a run, for the default row.
        command: the command line to show in the report.

    Raises:
        FileNotFoundError: a policy, the model, data or answers are missing.
        ValueError: bad settings or files, or a folder that another process writes to.
    """
    workdir = local_path(workdir)
    with user_input():
        unknown = [stage for stage in stages if stage not in STAGES]
        if unknown or not stages:
            raise ValueError(f"--stages is {','.join(stages)!r}, expected {', '.join(STAGES)}")
    with locked(workdir):
        _evaluate(run, workdir, stages, policy, command)


def _evaluate(
    run: EvaluationRun,
    workdir: Path,
    stages: Sequence[str],
    policy: str | Path | None,
    command: str | None,
) -> None:
    """Evaluates in a folder that no other process writes to."""
    settings = run.eval
    with user_input():
        report, answers = workdir / "report", answers_folder(run, workdir)
        if "score" in stages and report.exists():  # checked first, as answering takes hours
            report_folder.open_folder(report)
    shapes, ask = SHAPES in settings.benchmark_names, None
    begin = time.monotonic()
    if "generate" in stages:
        generate_answers(run, workdir, policy=policy)
    if not distributed.is_main():
        return
    if "convert" in stages:
        convert_answers(workdir, answers, settings)
    if "score" in stages:
        with user_input():
            roots = {name: Path(settings.data) for name in settings.public}
            if shapes:
                roots[SHAPES] = split_folders(run, workdir)["test"]
            report_folder.open_folder(report)
            scores = score_answers(answers, roots, report)
            table = merge_scores({workdir.name: scores})
        write_table(report, table)
        if shapes:
            own, data = _policy_file(workdir, policy), roots[SHAPES]
            ask = None if own is None else _ask(run, own, data)
            _report_shapes(run, answers / SHAPES, data, report, own, ask, command)
        if settings.public:
            print(as_markdown(table), end="")
            draw(answers, settings, report, command)
    print(f"evaluated in {time.monotonic() - begin:.0f} s")
    if ask is not None:
        print(f"Ask the policy yourself:\n  {ask}")


def _ask(run: EvaluationRun, policy: Path, data: Path) -> str:
    """Returns a command that asks the policy a question of the test split."""
    question = read_questions(data / "test.jsonl", data / "images")[0]
    python = os.path.relpath(sys.executable) if _is_below(sys.executable) else "python"
    script = command_line.program("")  # of an installed package
    words = ["stepprune-generate"] if script else [python, "-m", "stepprune_jax.generate"]
    words += ["--model", run.model.folder or "shapes", "--policy", str(policy)]
    words += ["--image", os.path.relpath(question.image)]
    return shlex.join([*words, "--prompt", question.text, "--overlay", "kept.png"])


def _is_below(path: str) -> bool:
    """Returns whether a path lies in the current folder; links are not resolved."""
    return Path(os.path.abspath(path)).is_relative_to(Path.cwd())


def _policy_file(workdir: Path, policy: str | Path | None) -> Path | None:
    """Returns the file of the default row's policy; None if it has been removed since."""
    with contextlib.suppress(OSError, ValueError):
        return own_policy(workdir, policy)
    return None


def _report_shapes(
    run: EvaluationRun,
    folder: Path,
    data: Path,
    report: Path,
    policy: Path | None,
    ask: str | None,
    command: str | None,
) -> None:
    """Reports on the shapes world, once every requested row is complete."""
    settings = run.eval
    labels = [label for label in settings.labels if settings.wants(label)]
    if DEFAULT in labels:
        labels.append(OWN_STOP)
    budgets = [Budget.parse(budget) for budget in settings.budgets]
    files = []
    for file in read_files(folder):
        n = file.provenance.num_tokens
        counts = (None, n, *(budget.count(n) for budget in budgets))
        if file.provenance.method in labels and file.provenance.budget in counts:
            files.append(file)
    open_ends = [f for f in files if _answered(f) < f.provenance.asked]
    if open_ends or ALL not in [f.provenance.method for f in files]:
        what = open_ends[0].path if open_ends else f"{ALL!r} in {folder}"
        print(f"no report on {SHAPES}: the answers of {what} are incomplete")
    elif not all(f.provenance.made for f in files):
        print(
            f"no report on {SHAPES}: {folder} holds answers of an older version, which lack the "
            "kept tokens; the report is left unchanged. Move the folder away and run eval.py again"
        )
    else:
        files = in_table_order(files, settings.labels)
        table = write_report(run, files, data, report, policy=policy, ask=ask)
        print(markdown_table(table), end="")
        if DEFAULT not in labels:
            print(f"no figures without the row {DEFAULT!r}; tables: {report}")
            return
        # Imported here: only drawing needs these packages.
        from stepprune_jax.visualize import redraw

        page = redraw(report, command=command)
        print(f"{table[0]['questions']:,} questions, {len(table)} rows; report: {page}")


def convert_answers(workdir: Path, answers: Path, settings: EvalSettings) -> None:
    """Writes workdir/submissions/BENCHMARK/METHOD for benchmarks with a submission format.

    An answer file that is incomplete or cannot be converted is reported and skipped.

    Args:
        workdir: folder of the run.
        answers: folder with one folder per benchmark.
        settings: settings of the evaluation.
    """
    for name in settings.public:
        convert = BENCHMARKS[name].convert
        for file in read_files(answers / name) if convert is not None else []:
            out = (
                workdir / SUBMISSIONS / name / (file.path.stem + BENCHMARKS[name].submission_suffix)
            )
            count, asked = _answered(file), file.provenance.asked
            if count < asked:
                print(f"not converted: {file.path}: {count:,} of {asked:,} questions answered")
                continue
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    convert(Path(settings.data), file.path, out)
            except (OSError, ValueError) as error:
                print(f"not converted: {one_line(error)}")
                continue
            for warning in caught:
                print(f"warning: {name}, {file.path.stem}: {one_line(warning.message)}")
            print(f"wrote {out}")


def draw(answers: Path, settings: EvalSettings, report: Path, command: str | None) -> Path:
    """Draws figures of each public benchmark and appends them to the table.

    Args:
        answers: folder with one folder per benchmark.
        settings: settings of the evaluation.
        report: folder with benchmarks.md.
        command: the command line to show.

    Returns:
        The page, report/benchmarks.md.
    """
    from stepprune_jax.visualize.benchmarks import (
        default_file,
        draw_benchmark_counts,
        draw_benchmark_overlays,
    )

    root, figures = Path(settings.data), []
    for name in settings.public:
        files = [f for f in read_files(answers / name) if _answered(f) == f.provenance.asked]
        benchmark, mine = BENCHMARKS[name], default_file(files)
        if mine is None:
            continue
        figures.append(draw_benchmark_counts(report / f"k_{name}.png", benchmark, root, files))
        questions = public_questions(name, settings)
        if questions_digest(questions) == mine.provenance.questions:
            path = report / f"overlays_{name}.png"
            figures.append(draw_benchmark_overlays(path, benchmark, root, mine, questions))
    page = report / f"{NAME}.md"
    shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in figures if path is not None)
    made = f"\nWritten by `{command}`.\n" if command else ""
    page.write_text(
        page.read_text(encoding="utf-8") + shown + made, encoding="utf-8", errors="backslashreplace"
    )
    print(f"report: {page}")
    return page


def _answered(file: AnswerFile) -> int:
    """Counts the complete lines."""
    return file.path.read_bytes().count(b"\n")


def main() -> None:
    """Runs the command."""
    command_line.define_config()
    flags.DEFINE_string("workdir", None, "Folder of a training run; default: runs/CONFIG.")
    text = "Policy to use instead of the workdir's: a file, a shipped name, or hub:owner/name."
    flags.DEFINE_string("policy", None, text)
    flags.DEFINE_list("stages", list(STAGES), f"Some of {','.join(STAGES)}.")
    command_line.run("eval.py", _main)


def _main() -> None:
    """Reads the flags and evaluates."""
    given = flags.FLAGS
    with user_input():
        run = read_evaluation(given.config)
        distributed.use_cores(given.config.get("cpu_devices", 0))
        distributed.start()
    evaluate(
        run,
        given.workdir,
        stages=given.stages,
        policy=given.policy,
        command=command_line.command(),
    )


if __name__ == "__main__":
    main()
