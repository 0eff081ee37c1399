"""Commands report user errors in one line, and bugs with their traceback."""

import builtins
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import jax
import pytest
from PIL import Image
from processes import run_python

from stepprune_jax import configurations
from stepprune_jax.cli import train as train_command
from stepprune_jax.cli.command_line import (
    Messages,
    Parser,
    StoreOnce,
    add_config,
    command,
    exit_with,
    file_to_write,
    one_line_errors,
    read_config,
)
from stepprune_jax.cli.generate import main as generate_command
from stepprune_jax.extras import MissingPackageError
from stepprune_jax.parallel.distributed import use_cores
from stepprune_jax.serving.fields import RequestError
from stepprune_jax.training import Run
from stepprune_jax.user_input import UserError, local_path, one_line

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("steps is 0,\nexpected more"), 2, "error: steps is 0, expected more"),
        (MissingPackageError("pip install x"), 2, "error: pip install x"),
        (FileNotFoundError("no file at /x"), 2, "error: no file at /x"),
        (IsADirectoryError(21, "a folder", "/x"), 2, "error: [Errno 21] a folder: '/x'"),
        (KeyboardInterrupt(), 128 + signal.SIGINT, "interrupted"),
        (MemoryError("1 GiB"), 2, "error: out of memory: 1 GiB"),
        (RuntimeError("Unable to initialize backend"), 2, "error: Unable to initialize backend"),
    ],
)
def test_errors_outside_the_code_are_reported_in_one_line(capsys, error, status, message):
    with pytest.raises(SystemExit) as exit_error, one_line_errors("prog"):
        raise error
    assert exit_error.value.code == status
    assert capsys.readouterr().err == f"prog: {message}\n"


@pytest.mark.parametrize("number", [0, signal.SIGINT, signal.SIGTERM])
def test_the_exit_status_of_training_tells_which_signal_stopped_it(tmp_path, monkeypatch, number):
    monkeypatch.setattr(train_command, "train", lambda *_: int(number))
    monkeypatch.setattr(train_command.distributed, "use_cores", lambda _: None)
    arguments = ("--config", "shapes", "--workdir", tmp_path)
    status = commands.status("train.py", train_command.main, *arguments)
    assert status == {0: 0, signal.SIGINT: 130, signal.SIGTERM: 143}[number]


# Built-in errors that indicate a bug. Errors about files, memory and packages have other causes.
BUGS = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, (ExceptionGroup, UnicodeError, MemoryError, Warning))
    and not issubclass(kind, (FileNotFoundError, FileExistsError))
    and not issubclass(kind, (IsADirectoryError, NotADirectoryError, BrokenPipeError))
]


@pytest.mark.parametrize("kind", [*BUGS, jax.errors.JaxRuntimeError, RequestError])
def test_errors_of_other_classes_are_not_changed(kind):
    bug = kind(400, "a") if kind is RequestError else kind("a")
    with pytest.raises(kind) as error, one_line_errors("prog"):
        raise bug
    assert error.value is bug


@pytest.mark.parametrize("function", ["request.open_image", "programs.run_first_tokens"])
def test_a_bug_inside_the_library_keeps_its_traceback(monkeypatch, function, tmp_path):
    """Only a UserError is a user's mistake. A plain ValueError of our code is a bug."""

    def fail(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(f"stepprune_jax.inference.{function}", fail)
    image = tmp_path / "a.png"
    Image.new("RGB", (40, 30)).save(image)
    with pytest.raises(ValueError, match=r"^a bug$"), one_line_errors("prog"):
        generate_command(["--model=shapes", f"--image={image}", "--prompt=Which?"])


HOSTILE = "a\n\r\u2028b \x1b[2J\x07\0\udcff.png"  # a possible name of a file
SHOWN = r"a b \x1b[2J\x07\x00\udcff.png"


def make_flags_parser():
    parser = Parser(prog="tool")
    parser.add_argument("--max_tokens", type=int)
    parser.add_argument("--prompt", action=StoreOnce)
    parser.add_argument("--image", action="append")
    parser.add_argument("--is_json", action="store_true")
    parser.add_argument("rest", nargs="*")
    return parser


def test_flags_may_be_written_with_dashes():
    arguments = ["--max-tokens=3", "--is-json", "--image", "a-b", "--", "--max-tokens"]
    flags = make_flags_parser().parse_args(arguments)
    assert vars(flags) == {
        "max_tokens": 3,
        "prompt": None,
        "is_json": True,
        "image": ["a-b"],
        "rest": ["--max-tokens"],
    }


def test_a_second_prompt_is_refused_and_other_flags_may_be_overridden(capsys):
    parser = make_flags_parser()
    assert parser.parse_args(["--max_tokens", "3", "--max-tokens=4"]).max_tokens == 4
    assert parser.parse_args(["--prompt", "a"]).prompt == "a"
    with pytest.raises(SystemExit) as error:
        parser.parse_args(["--prompt", "a", "--prompt", "b"])
    assert error.value.code == 2
    expected = "tool: error: argument --prompt: given twice, expected once\n"
    assert capsys.readouterr().err == expected


def test_file_names_with_control_characters_are_escaped(capsys):
    assert one_line(HOSTILE) == SHOWN and one_line("Größe 5 µm: 漢字 🙂") == "Größe 5 µm: 漢字 🙂"
    with pytest.raises(SystemExit), one_line_errors("prog"):
        raise FileNotFoundError(f"no file at {HOSTILE}")
    with pytest.raises(SystemExit):
        Parser(prog="prog").parse_args([HOSTILE])
    # pytest captures records of loggers, and its workers only send UTF-8, so no logger is used.
    record = {"levelno": logging.WARNING, "msg": "%s is missing", "args": (HOSTILE,)}
    Messages("stdout").emit(logging.makeLogRecord(record))
    assert capsys.readouterr().err.splitlines() == [
        f"prog: error: no file at {SHOWN}",
        f"prog: error: unrecognized arguments: {SHOWN}",
        f"warning: {SHOWN} is missing",
    ]
    error = ZeroDivisionError("why")
    record = {"levelno": logging.ERROR, "msg": "failed", "exc_info": (type(error), error, None)}
    Messages("stdout").emit(logging.makeLogRecord(record))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["warning: failed", "ZeroDivisionError: why"]


python = functools.partial(run_python, folder=ROOT)


class EndedError(Exception):
    """Replaces the end of a process."""


@pytest.mark.parametrize(
    ("error", "status"), [(UserError("x"), 2), (KeyError("a bug"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_failed_process_of_several_exits_at_once(monkeypatch, capsys, error, status):
    """jax's exit would wait five minutes for the remaining processes."""

    def fail():
        raise error

    def end(status):
        raise EndedError(status)

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises((SystemExit, KeyError)):  # a single process exits as usual
        exit_with("prog", fail)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(EndedError, match=f"^{status}$"):
        exit_with("prog", fail)
    assert "prog: error: x\n" in capsys.readouterr().err or status != 2
    for result in (None, 0, 130):
        with pytest.raises(SystemExit):
            exit_with("prog", lambda result=result: result)


def test_output_escapes_characters_that_the_encoding_lacks():
    code = PRINTS.replace("print(number)", r"print('\udcff 漢')")
    process = python("-c", code, "1", PYTHONIOENCODING="ascii")
    assert (process.stdout, process.stderr) == ("\\udcff \\u6f22\n", "")


def test_a_missing_platform_is_reported_in_one_line():
    """CUDA_VISIBLE_DEVICES hides a GPU that this machine may have."""
    code = "import jax; from stepprune_jax.cli.command_line import exit_with\n"
    code += "exit_with('prog', lambda: print(jax.numpy.zeros(1)))"
    process = python("-c", code, JAX_PLATFORMS="cuda", CUDA_VISIBLE_DEVICES="")
    assert process.returncode == 2 and not process.stdout
    assert process.stderr.startswith("prog: error: JAX_PLATFORMS is 'cuda'")
    assert process.stderr.count("\n") == 1


def test_a_closed_pipe_has_an_equal_status_without_the_signal_sigpipe(monkeypatch, capsys):
    """Windows has no signal.SIGPIPE."""
    monkeypatch.delattr(signal, "SIGPIPE")
    monkeypatch.setattr("stepprune_jax.cli.command_line._discard_output", lambda: None)
    with pytest.raises(SystemExit) as exit_error, one_line_errors("prog"):
        raise BrokenPipeError
    assert exit_error.value.code == 141 and not capsys.readouterr().err


def test_a_program_may_run_without_stdout(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with one_line_errors("prog"):
        print("nowhere")


def test_the_folder_of_a_result_must_exist(tmp_path):
    assert file_to_write("--json", str(tmp_path / "new.json")) == tmp_path / "new.json"
    for bad in ("", str(tmp_path), str(tmp_path / "absent" / "new.json")):
        with pytest.raises(ValueError, match=f"--json is {bad!r}, expected a file in a folder"):
            file_to_write("--json", bad)


def test_the_home_folder_of_an_unknown_user_stays_unchanged(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/x") == tmp_path / "x"
    assert local_path("~no-such-user/x") == Path("~no-such-user/x")


PRINTS = """
import sys
from stepprune_jax.cli.command_line import exit_with
def main():
    sys.stdin.read()  # waits until the reader has closed the output
    for number in range(int(sys.argv[1])):
        print(number)
exit_with("prog", main)
"""


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_closed_pipe_ends_silently_and_a_full_disk_is_reported(lines):
    command = [sys.executable, "-c", PRINTS, str(lines)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait() == 128 + signal.SIGPIPE
    with open("/dev/full", "w") as full:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": full, "stderr": subprocess.PIPE}
        finished = subprocess.run(command, cwd=ROOT, text=True, **pipes)
    assert finished.returncode == 2
    assert finished.stderr == "prog: error: [Errno 28] No space left on device\n"


def read(arguments, kind=Run):
    parser = Parser(prog="train.py")
    add_config(parser)
    return read_config(parser, arguments, kind)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.steps=many"], "config.steps is 'many'"),
        (["--config=shape"], "Did you mean shapes?"),
        (["more", "words"], "unexpected arguments: more words\n"),
        (["--steps", "9"], "unexpected arguments: --steps 9. Did you mean --config.steps?"),
        (["--batch-size=3"], "Did you mean --config.batch_size or --config.eval.batch_size?"),
        (["--budget=16"], "Did you mean --config.eval.budgets or --config.validation.budget?"),
        (["config.learning_rate=1"], "Did you mean --config.optimizer.lr or --config.rloo.lr or"),
        (["config.optimizer.lr=1"], "Did you mean --config.optimizer.lr?"),
        # The value is wrong, not the name of the flag.
        (["--config.optimizer.warmup=9999"], "below config.steps (500)\n"),
        (["--learning-rate=1"], "Did you mean --config.optimizer.lr or --config.rloo.lr or"),
        (["--workdri=x"], "unexpected arguments: --workdri=x. Did you mean --workdir?"),
        (["--workdir="], "--workdir is empty"),
        (["--config=experiments/configs/pretrain_shapes.py"], "is Pretraining, expected Run"),
    ],
)
def test_bad_command_lines_are_refused(monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(ROOT)
    config = [] if arguments[0].startswith("--config=") else ["--config=configs/shapes.py"]
    with pytest.raises(SystemExit) as exit_error:
        read([*config, *arguments])
    error = capsys.readouterr().err
    assert exit_error.value.code == 2 and message in error and error.count("\n") == 1


def test_flags_change_a_named_configuration(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags, run = read(["--config", "shapes:literal", "--config.steps=70", "--config.tensorboard"])
    assert (run.steps, run.policy.stop, run.tensorboard) == (70, "softmax", True)
    flags_of_path, _ = read([f"--config={ROOT}/configs/shapes.py:literal"])
    assert flags.workdir == flags_of_path.workdir == Path("runs/shapes-literal")


def test_the_command_line_is_printed_as_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval.py", "--policy", "a b"])
    assert command() == "python eval.py --policy 'a b'"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/stepprune-eval", "--config=shapes"])
    assert command() == "stepprune-eval --config=shapes"


def test_the_number_of_cpu_devices_can_be_set():
    with pytest.raises(ValueError, match=r"cpu_devices is 99999, expected an integer from 0 to"):
        use_cores(99_999)
    old_number = jax.config.jax_num_cpu_devices
    use_cores(0)
    assert jax.config.jax_num_cpu_devices == old_number
    code = "import jax; from stepprune_jax.parallel.distributed import use_cores\n"
    code += "use_cores(3); print(jax.device_count())"
    process = python("-c", code, XLA_FLAGS="", JAX_PLATFORMS="cpu")
    assert process.stdout == "3\n", process.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:", r"mistaken\.py, line 1: SyntaxError"),
        ("def get_config():\n    return 1 / 0", r"mistaken\.py, line 2: ZeroDivisionError"),
        ("def get_config():\n    int('x')", r"mistaken\.py: invalid literal"),
        ("def get_config():\n    return {}", r"mistaken\.py: .* settings, not dict"),
        ("x = 1", r"mistaken\.py: expected a get_config that returns settings"),
    ],
)
def test_mistakes_in_a_configuration_file_are_reported_with_their_line(tmp_path, text, message):
    path = tmp_path / "mistaken.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        configurations.load(str(path))


COMPILES = """
import jax
from stepprune_jax.cli import command_line
command_line.Parser(compiles=True).parse_args()
jax.jit(lambda x: x @ x)(jax.numpy.ones((3, 3)))
print(jax.config.jax_compilation_cache_dir)
"""


def test_commands_keep_compiled_programs_in_the_users_cache(tmp_path):
    variables = {"XDG_CACHE_HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    process = python("-c", COMPILES, **variables)
    assert process.stdout.strip() == str(tmp_path / "stepprune_jax")


@pytest.mark.parametrize(
    ("flags", "folder"),
    [(["--no_compile_cache"], None), ([], "users_folder")],
)
def test_a_configured_cache_folder_of_jax_is_kept(flags, folder):
    old_folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder)
    try:
        Parser(compiles=True).parse_args(flags)
        assert jax.config.jax_compilation_cache_dir == folder
    finally:
        jax.config.update("jax_compilation_cache_dir", old_folder)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        # Without the question, the message names the missing flag only.
        (["--modl", "x"], "unknown flag --modl. Did you mean --model?"),
        (["--model=x", "--polcy=y"], "unrecognized arguments: --polcy=y. Did you mean --policy?"),
        # Read after the other flags, by commands with a configuration.
        (["--config.max_tokens=9"], "the following arguments are required: --model"),
        # "--pol" is an abbreviation.
        (["--pol=y", "--max-tokns=1"], "unknown flag --max-tokns. Did you mean --max_tokens?"),
        (["--bugdet=3"], "the following arguments are required: --model"),
        (["--model=x", "--bugdet=3"], "unrecognized arguments: --bugdet=3"),
    ],
)
def test_a_misspelled_flag_is_asked_about(capsys, arguments, problem):
    parser = Parser(prog="ask")
    parser.add_argument("--model", required=True)
    parser.add_argument("--policy")
    parser.add_argument("--max_tokens")
    parser.add_argument("--out")
    parser.add_argument("--config")
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)
    assert capsys.readouterr().err == f"ask: error: {problem}\n"


def test_flags_with_dashes_can_be_abbreviated():
    parser = Parser()
    parser.add_argument("--max_tokens", type=int)
    for arguments in (["--max-tokens=3"], ["--max-tok", "3"], ["--max_t=3"]):
        assert parser.parse_args(arguments).max_tokens == 3
