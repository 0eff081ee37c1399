"""Evaluates policies: `stepprune-eval --config shapes --workdir runs/shapes`.

An evaluation has three stages, and `--stages` selects some of them. The stage generate answers the
questions of each benchmark. After an interruption, it continues with the unanswered questions. The
stage convert writes the answers in the formats of official programs and servers. The stage score
compares the answers with the annotations and writes the report. The benchmark `folder` is the test
split of `config.data.folder`, and `--config.eval.benchmarks=pope,mme` selects public benchmarks.
Flags can set any field of the configuration.
"""

from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.benchmarks import BENCHMARKS, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import (
    ANSWERS,
    AnswerFile,
    questions_digest,
    read_files,
)
from stepprune_jax.cli import command_line
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.generate_stage import generate_answers
from stepprune_jax.evaluation.scores import SCORES, score_file, score_hard
from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.evaluation.table import as_markdown, merge_scores, write_table
from stepprune_jax.extras import need
from stepprune_jax.parallel import distributed
from stepprune_jax.user_input import UserError, expect, local_path, one_line
from stepprune_jax.workdir.lock import locked

STAGES = ("generate", "convert", "score")
_NAME = "eval.py"
SUBMISSIONS = "submissions"
REPORT = "report"


def evaluate(
    run: EvaluationRun,
    workdir: str | Path,
    *,
    stages: Sequence[str] = STAGES,
    policy: str | Path | None = None,
    command: str | None = None,
) -> None:
    """Evaluates a run on the benchmarks of its configuration.

    Args:
        run: the configuration.
        workdir: folder of the run.
        stages: names of stages, which run in the order of `STAGES`.
        policy: policy to evaluate instead of the run's policy.
        command: the command line that the report shows.

    Raises:
        UserError: a stage is unknown.
    """
    workdir = local_path(workdir)
    is_valid = bool(stages) and {*stages} <= {*STAGES}
    expect("--stages", ",".join(stages), is_valid, ", ".join(STAGES))
    if "score" in stages:
        need("matplotlib", "the report has figures")
    with locked(workdir):
        if "generate" in stages:
            generate_answers(run, workdir, policy=policy)
        if not distributed.is_main():
            return
        if "convert" in stages:
            convert_answers(run, workdir)
        if "score" in stages:
            report_answers(run, workdir, command)


def convert_answers(run: EvaluationRun, workdir: Path) -> None:
    """Writes workdir/submissions/BENCHMARK/METHOD for benchmarks with a submission format.

    Prints a line for each answer file that is incomplete or cannot be converted, and skips it.
    """
    for name in run.eval.benchmark_names:
        convert, suffix = BENCHMARKS[name].convert, BENCHMARKS[name].submission_suffix
        files = read_files(workdir / ANSWERS / name) if convert is not None else []
        for file in files:
            out = workdir / SUBMISSIONS / name / (file.path.stem + suffix)
            # Counts complete lines: an interruption may have truncated the last line.
            num_answered, num_questions = file.path.read_bytes().count(b"\n"), file.provenance.asked
            if num_answered < num_questions:
                progress = f"{num_answered:,} of {num_questions:,} questions answered"
                print(f"not converted: {file.path}: {progress}")
                continue
            try:
                warnings = convert(run.root(name), file.path, out)
            except (OSError, UserError) as error:
                print(f"not converted: {one_line(error)}")
                continue
            for warning in warnings:
                print(f"warning: {name}, {file.path.stem}: {one_line(warning)}")
            print(f"wrote {out}")


def report_answers(run: EvaluationRun, workdir: Path, command: str | None) -> None:
    """Scores all answers, and writes scores.json, the table and the page to workdir/report.

    Raises:
        FileNotFoundError: there is no answer file.
    """
    # Imported here because only drawing needs these packages.
    from stepprune_jax.visualize.report import NAME, AnsweredBenchmark, write_page

    names, report = run.eval.benchmark_names, workdir / REPORT
    files = {name: read_files(workdir / ANSWERS / name) for name in names}
    if not any(files.values()):
        problem = f"no answers to {', '.join(names)} in {workdir / ANSWERS}"
        raise FileNotFoundError(f"{problem}: run the stage generate")
    scores = {
        file.path: score_file(file, run.root(name), run.seed)
        for name in names
        for file in files[name]
    }
    benchmarks = []
    for name in names:
        complete_files = [
            file for file in files[name] if scores[file.path]["answered"] >= file.provenance.asked
        ]
        for path, hard_scores in score_hard(complete_files, run.root(name)).items():
            scores[path] |= hard_scores
        questions = _read_questions(run, name, complete_files)
        benchmarks.append(
            AnsweredBenchmark(BENCHMARKS[name], run.root(name), complete_files, questions)
        )
    report.mkdir(parents=True, exist_ok=True)
    write_json(report / SCORES, [*scores.values()])
    table = merge_scores({workdir.name: [*scores.values()]}, run.eval.labels)
    table = table._replace(remarks=run.eval.remarks)
    write_table(report, table)
    print(as_markdown(table), end="")
    samples = run.eval.samples
    page = write_page(report / NAME, table, benchmarks, samples=samples, command=command)
    print(f"report: {page}")


def _read_questions(
    run: EvaluationRun, name: str, files: Sequence[AnswerFile]
) -> list[BenchmarkQuestion]:
    """Reads a benchmark's questions, for examples in the report.

    Returns:
        The questions; an empty list if they are not found or differ from the answered questions.
    """
    try:
        questions = run.questions(name)
    except (OSError, UserError) as error:
        print(f"no examples of {name}: {one_line(error)}")
        return []
    digest = questions_digest(questions)
    return questions if all(file.provenance.questions == digest for file in files) else []


def command() -> None:
    """Runs the command and exits with its status."""
    command_line.exit_with(_NAME, main, progress="stdout")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = command_line.Parser(
        prog=command_line.program(_NAME), description=__doc__, compiles=True
    )
    command_line.add_config(parser)
    text = "policy to use instead of the run's policy: a file, a shipped name, or hub:owner/name"
    parser.add_argument("--policy", help=text)
    stages = ",".join(STAGES)
    parser.add_argument("--stages", default=stages, help=f"comma-separated list of {stages}")
    flags, run = command_line.read_config(parser, arguments, EvaluationRun)
    distributed.use_cores(run.cpu_devices)
    distributed.start()
    evaluate(
        run,
        flags.workdir,
        stages=flags.stages.split(","),
        policy=flags.policy,
        command=command_line.command(),
    )


if __name__ == "__main__":
    command()
