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

from stepprune_jax.benchmarks import BENCHMARKS, BenchmarkQuestion, folder
from stepprune_jax.benchmarks.answer_files import ANSWERS, AnswerFile, questions_digest, read_files
from stepprune_jax.cli import command_line
from stepprune_jax.cli.choices import STAGES
from stepprune_jax.cli.flags.evaluate import NAME, build_parser
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.formats import as_markdown, write_table
from stepprune_jax.evaluation.generate_stage import generate_answers
from stepprune_jax.evaluation.names import without_learned_stop
from stepprune_jax.evaluation.scores import SCORES, score_files, score_hard
from stepprune_jax.evaluation.settings import EvaluationRun, read_seed
from stepprune_jax.evaluation.table import merge_scores
from stepprune_jax.extras import need
from stepprune_jax.parallel import distributed
from stepprune_jax.user_input import UserError, expect, local_path, one_line
from stepprune_jax.workdir.lock import locked

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
        run: the configuration of the evaluation.
        workdir: folder for answers, submissions and the report.
        stages: names of the stages to run, in any order; a subset of `STAGES`.
        policy: policy to evaluate instead of the run's policy, as --policy names it.
        command: the command line that the report shows; None shows no command.

    Raises:
        UserError: a stage is unknown, or a test question of a data folder has no correct answer.
        KeyboardInterrupt: Ctrl-C stopped the stage generate. If the stage score is requested, the
            report of the answers so far has been written.
    """
    workdir = local_path(workdir)
    is_valid = bool(stages) and {*stages} <= {*STAGES}
    expect("--stages", ",".join(stages), is_valid, ", ".join(STAGES))
    if "score" in stages:
        need("matplotlib", "the report has figures")
        if folder.BENCHMARK.name in run.eval.benchmark_names:
            folder.check_answers(run.root(folder.BENCHMARK.name))
    if "convert" in stages:
        for benchmark_name in run.eval.benchmark_names:
            BENCHMARKS[benchmark_name].check_packages()
    with locked(workdir):
        if "generate" in stages:
            try:
                generate_answers(run, workdir, policy=policy)
            except KeyboardInterrupt:
                if "score" in stages and distributed.is_main():
                    _report_stopped_run(run, workdir, command, policy)
                raise
        if not distributed.is_main():
            return
        if "convert" in stages:
            convert_answers(run, workdir)
        if "score" in stages:
            report_answers(run, workdir, command, policy)


def _report_stopped_run(
    run: EvaluationRun, workdir: Path, command: str | None, policy: str | Path | None
) -> None:
    """Writes the report of the answers of a stopped run, if there is one."""
    try:
        report_answers(run, workdir, command, policy)
    except FileNotFoundError:  # there is no answer yet
        return
    print("stopped: this report covers the answers so far; the same command continues")


def convert_answers(run: EvaluationRun, workdir: Path) -> None:
    """Writes workdir/submissions/BENCHMARK/METHOD for benchmarks with a submission format.

    Skips answer files that are incomplete or cannot be converted, and prints a line for each.

    Args:
        run: the configuration of the evaluation.
        workdir: folder with the answers.
    """
    for benchmark_name in run.eval.benchmark_names:
        benchmark = BENCHMARKS[benchmark_name]
        if benchmark.convert is None:
            continue
        for answers in read_files(workdir / ANSWERS / benchmark_name):
            method = answers.path.stem
            out = workdir / SUBMISSIONS / benchmark_name / (method + benchmark.submission_suffix)
            # Counts complete lines: an interruption may have truncated the last line.
            num_answered = answers.path.read_bytes().count(b"\n")
            if num_answered < (num_asked := answers.provenance.asked):
                progress = f"{num_answered:,} of {num_asked:,} questions answered"
                print(f"not converted: {answers.path}: {progress}")
                continue
            try:
                warnings = benchmark.convert(run.root(benchmark_name), answers.path, out)
            except (OSError, UserError) as error:
                print(f"not converted: {one_line(error)}")
                continue
            for warning in warnings:
                print(f"warning: {benchmark_name}, {method}: {one_line(warning)}")
            print(f"wrote {out}")


def report_answers(
    run: EvaluationRun, workdir: Path, command: str | None, policy: str | Path | None = None
) -> None:
    """Scores all answers, and writes scores.json, the table and the page to workdir/report.

    Args:
        run: the configuration of the evaluation.
        workdir: folder with the answers.
        command: the command line that the page shows; None shows no command.
        policy: policy instead of the run's policy, as --policy names it.

    Raises:
        FileNotFoundError: there is no answer file.
    """
    # Imported here because only this stage needs the packages for drawing.
    from stepprune_jax.visualize.report import NAME, AnsweredBenchmark, write_page

    names, report_folder = run.eval.benchmark_names, workdir / REPORT
    files = {name: read_files(workdir / ANSWERS / name) for name in names}
    if not any(files.values()):
        problem = f"no answers to {', '.join(names)} in {workdir / ANSWERS}"
        raise FileNotFoundError(f"{problem}: run the stage generate")
    # A policy may be on the hub, so its seed is read once for all its rows.
    seed_of_row: dict[str, int | None] = {}

    def seed_of(file: AnswerFile) -> int | None:
        method = file.provenance.method
        if method not in seed_of_row:
            seed_of_row[method] = read_seed(run.eval, file.provenance, workdir, policy)
        return seed_of_row[method]

    scores = {
        path: score
        for name in names
        for path, score in score_files(files[name], run.root(name), seed_of).items()
    }
    benchmarks = []
    for name in names:
        complete_files = [
            file for file in files[name] if scores[file.path]["answered"] >= file.provenance.asked
        ]
        # Scores on the questions that a downsampled image does not answer need complete files.
        for path, hard_scores in score_hard(complete_files, run.root(name)).items():
            scores[path] |= hard_scores
        questions = _read_questions(run, name, complete_files)
        benchmarks.append(
            AnsweredBenchmark(BENCHMARKS[name], run.root(name), complete_files, questions)
        )
    report_folder.mkdir(parents=True, exist_ok=True)
    write_json(report_folder / SCORES, [*scores.values()])
    table = merge_scores({workdir.name: [*scores.values()]}, run.eval.labels)
    row_names = {without_learned_stop(row.method) for row in table.rows}
    # A row of `rows` is a policy of another run, so a note names its file.
    policy_notes = [
        f"{label} is the policy {file}"
        for label, file in run.eval.rows.items()
        if label in row_names
    ]
    table = table._replace(remarks=(*run.eval.remarks, *policy_notes))
    write_table(report_folder, table)
    print(as_markdown(table), end="")
    file, num_examples = report_folder / NAME, run.eval.samples
    page = write_page(file, table, benchmarks, num_examples=num_examples, command=command)
    print(f"report: {page}")


def _read_questions(
    run: EvaluationRun, name: str, files: Sequence[AnswerFile]
) -> list[BenchmarkQuestion]:
    """Reads a benchmark's questions, for examples in the report.

    Args:
        run: the configuration of the evaluation.
        name: name of the benchmark.
        files: the complete answer files of the benchmark.

    Returns:
        The questions. An empty list if the benchmark's files are missing, or if its questions
        differ from the answered questions.
    """
    try:
        questions = run.questions(name)
    except (OSError, UserError) as error:
        print(f"no examples of {name}: {one_line(error)}")
        return []
    digest = questions_digest(questions)
    return questions if all(file.provenance.questions == digest for file in files) else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the configuration, and runs the requested stages of its evaluation.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    flags, run = command_line.read_config(build_parser(), arguments, EvaluationRun)
    distributed.use_cores(run.cpu_devices)
    distributed.start()
    stages, command = flags.stages.split(","), command_line.command()
    evaluate(run, flags.workdir, stages=stages, policy=flags.policy, command=command)


def command() -> None:
    """Runs the command and exits with its status."""
    command_line.exit_with(NAME, main, progress="stdout")


if __name__ == "__main__":
    command()
