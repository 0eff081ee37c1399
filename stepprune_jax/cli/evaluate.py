"""Evaluates policies: `stepprune-eval --config shapes --workdir runs/shapes`.

There are three stages, run in turn or singly (`--stages`). *generate* turns model and question
files into answer files; once interrupted, it resumes with the unanswered questions. *convert* turns
answer files into the formats of official programs and servers. *score* turns answer files and
annotations into the report. The benchmark `folder` is the test split of `config.data.folder`;
`--config.eval.benchmarks=pope,mme` names others. Any field of the configuration can be set by a
flag.
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
    """Evaluates a run on the benchmarks that its configuration names."""
    workdir = local_path(workdir)
    known = bool(stages) and {*stages} <= {*STAGES}
    expect("--stages", ",".join(stages), known, ", ".join(STAGES))
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

    An answer file that is incomplete or cannot be converted is reported and skipped.
    """
    for name in run.eval.benchmark_names:
        convert, suffix = BENCHMARKS[name].convert, BENCHMARKS[name].submission_suffix
        files = read_files(workdir / ANSWERS / name) if convert is not None else []
        for file in files:
            out = workdir / SUBMISSIONS / name / (file.path.stem + suffix)
            # Complete lines: the last one may be cut off.
            count, asked = file.path.read_bytes().count(b"\n"), file.provenance.asked
            if count < asked:
                print(f"not converted: {file.path}: {count:,} of {asked:,} questions answered")
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
    """Scores all answers, and writes scores.json, the table and the page to workdir/report."""
    # Imported here: only drawing needs these packages.
    from stepprune_jax.visualize.report import NAME, Answered, write_page

    names, report = run.eval.benchmark_names, workdir / REPORT
    files = {name: read_files(workdir / ANSWERS / name) for name in names}
    if not any(files.values()):
        asked = f"no answers to {', '.join(names)} in {workdir / ANSWERS}"
        raise FileNotFoundError(f"{asked}: run the stage generate")
    scores = {f.path: score_file(f, run.root(n), run.seed) for n in names for f in files[n]}
    answered = []
    for name in names:
        whole = [f for f in files[name] if scores[f.path]["answered"] >= f.provenance.asked]
        for path, hard in score_hard(whole, run.root(name)).items():
            scores[path] |= hard
        questions = _questions(run, name, whole)
        answered.append(Answered(BENCHMARKS[name], run.root(name), whole, questions))
    report.mkdir(parents=True, exist_ok=True)
    write_json(report / SCORES, [*scores.values()])
    table = merge_scores({workdir.name: [*scores.values()]}, run.eval.labels)
    table = table._replace(remarks=run.eval.remarks)
    write_table(report, table)
    print(as_markdown(table), end="")
    samples = run.eval.samples
    page = write_page(report / NAME, table, answered, samples=samples, command=command)
    print(f"report: {page}")


def _questions(
    run: EvaluationRun, name: str, files: Sequence[AnswerFile]
) -> list[BenchmarkQuestion]:
    """Reads the questions that files answer; none if they or their images are elsewhere."""
    try:
        questions = run.questions(name)
    except (OSError, UserError) as error:
        print(f"no examples of {name}: {one_line(error)}")
        return []
    digest = questions_digest(questions)
    return questions if all(f.provenance.questions == digest for f in files) else []


def command() -> None:
    """Runs the command and exits with its status."""
    command_line.exit_with(_NAME, main, progress="stdout")


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the arguments and evaluates."""
    parser = command_line.Parser(
        prog=command_line.program(_NAME), description=__doc__, compiles=True
    )
    command_line.add_config(parser)
    text = "policy to use instead of the workdir's: a file, a shipped name, or hub:owner/name"
    parser.add_argument("--policy", help=text)
    stages = ",".join(STAGES)
    parser.add_argument("--stages", default=stages, help=f"some of {stages}")
    given, run = command_line.read_config(parser, arguments, EvaluationRun)
    distributed.use_cores(run.cpu_devices)
    distributed.start()
    evaluate(
        run,
        given.workdir,
        stages=given.stages.split(","),
        policy=given.policy,
        command=command_line.command(),
    )


if __name__ == "__main__":
    command()
