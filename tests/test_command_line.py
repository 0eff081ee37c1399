"""Mistakes in the input end a program in one line; bugs keep their traceback."""

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from stepprune_jax import configurations
from stepprune_jax.command_line import (
    Messages,
    Parser,
    add_config,
    command,
    default_workdir,
    file_to_write,
    one_line_errors,
    read_config,
)
from stepprune_jax.parallel.distributed import use_cores
from stepprune_jax.training import Run
from stepprune_jax.user_input import is_user_error, local_path, one_line, user_input

ROOT = Path(__file__).parents[1]


def marked(error):
    """An error about what the user gave."""
    with pytest.raises(type(error)), user_input():
        raise error
    return error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            marked(ValueError("config.steps is 0,\nexpected more")),
            2,
            "error: config.steps is 0, expected more",
        ),
        (marked(ImportError("pip install x")), 2, "error: pip install x"),
        *(
            (OSError(n, os.strerror(n), "/x/a"), 2, f"error: [Errno {n}] {os.strerror(n)}: '/x/a'")
            for n in (errno.ENOSPC, errno.EROFS, errno.EISDIR, errno.ENOENT)
        ),
        (KeyboardInterrupt(), 128 + signal.SIGINT, "interrupted"),
        (MemoryError("1 GiB"), 2, "error: out of memory: 1 GiB"),
        (
            RuntimeError("Unable to initialize backend 'x': no"),
            2,
            "error: Unable to initialize backend 'x': no",
        ),
    ],
)
def test_what_ends_a_program_is_reported_in_one_line(capsys, error, status, said):
    with pytest.raises(SystemExit) as ended, one_line_errors("prog"):
        raise error
    assert ended.value.code == status
    assert capsys.readouterr().err == f"prog: {said}\n"


@pytest.mark.parametrize(
    "bug",
    [
        *(ValueError("shapes differ"), OSError("disk full"), KeyError("x"), RuntimeError("a bug")),
        *(AssertionError(), ImportError("a bug")),
    ],
)
def test_other_errors_are_left_alone(bug):
    with pytest.raises(type(bug)) as found, one_line_errors("prog"):
        raise bug
    assert found.value is bug and not is_user_error(bug)


HOSTILE = "a\n\r\u2028b \x1b[2J\x07\0\udcff.png"  # as a file may be called
SHOWN = r"a b \x1b[2J\x07\x00\udcff.png"


def test_a_file_may_be_called_anything(capsys):
    assert one_line(HOSTILE) == SHOWN and one_line("Größe 5 µm: 漢字 🙂") == "Größe 5 µm: 漢字 🙂"
    with pytest.raises(SystemExit), one_line_errors("prog"), user_input():
        raise FileNotFoundError(f"no file at {HOSTILE}")
    with pytest.raises(SystemExit):
        Parser(prog="prog").parse_args([HOSTILE])
    # Not through a logger: pytest records what they are given, and its workers send UTF-8 only.
    record = {"levelno": logging.WARNING, "msg": "%s is missing", "args": (HOSTILE,)}
    Messages("stdout").emit(logging.makeLogRecord(record))
    assert capsys.readouterr().err.splitlines() == [
        f"prog: error: no file at {SHOWN}",
        f"prog: error: unrecognized arguments: {SHOWN}",
        f"warning: {SHOWN} is missing",
    ]


def test_output_has_every_character():
    code = PRINTS.replace("print(number)", r"print('\udcff 漢')")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code, "1"], cwd=ROOT, env=environment, input=b"", capture_output=True
    )
    assert (done.stdout, done.stderr) == (b"\\udcff \\u6f22\n", b"")


@pytest.mark.parametrize(
    ("platform", "said"),
    [("cuda", "JAX_PLATFORMS is 'cuda'"), ("nowhere", "Unable to initialize backend 'nowhere'")],
)
def test_a_platform_that_is_not_there_is_reported_in_one_line(platform, said):
    """A GPU may be there, so that of `cuda` is hidden."""
    code = "import jax; from stepprune_jax.command_line import exit_with\n"
    code += "exit_with('prog', lambda: print(jax.numpy.zeros(1)))"
    environment = os.environ | {"JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"prog: error: {said}") and done.stderr.count("\n") == 1


def test_a_program_may_have_no_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with one_line_errors("prog"):
        print("nowhere")


def test_a_result_needs_a_folder_before_the_work_begins(tmp_path):
    assert file_to_write("--json", str(tmp_path / "new.json")) == tmp_path / "new.json"
    for bad in ("", str(tmp_path), str(tmp_path / "absent" / "new.json")):
        with pytest.raises(ValueError, match=f"--json is {bad!r}, expected a file in a folder"):
            file_to_write("--json", bad)


def test_a_home_that_does_not_exist_is_part_of_the_name(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/x") == tmp_path / "x"
    assert local_path("~no-such-user/x") == Path("~no-such-user/x")


PRINTS = """
import sys
from stepprune_jax.command_line import exit_with
def main():
    sys.stdin.read()  # until whoever read the output has left
    for number in range(int(sys.argv[1])):
        print(number)
exit_with("prog", main)
"""


@pytest.mark.parametrize("lines", [1, 100_000])
def test_output_that_nobody_reads_and_output_that_cannot_be_written(lines):
    command = [sys.executable, "-c", PRINTS, str(lines)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait() == 128 + signal.SIGPIPE
    with open("/dev/full", "w") as full:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": full, "stderr": subprocess.PIPE}
        done = subprocess.run(command, cwd=ROOT, text=True, **pipes)
    assert (done.returncode, done.stderr) == (
        2,
        "prog: error: [Errno 28] No space left on device\n",
    )


def read(arguments, kind=Run):
    parser = Parser(prog="train.py")
    add_config(parser)
    return read_config(parser, arguments, kind)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--config.steps=many"], "config.steps is 'many', expected an integer from 1"),
        (["--config=absent.py"], "no configuration file absent.py, and no configuration of that"),
        (["--config=shape"], "Did you mean shapes? The names are llava13b, "),
        (["--config=llava7b:loose"], "the argument of llava7b is 'loose', expected"),
        (["more", "words"], "unexpected arguments: more words"),
        (["--workdir="], "--workdir is empty, expected a folder"),
        (["--config=experiments/configs/pretrain_shapes.py"], "is Pretraining, expected Run"),
    ],
)
def test_bad_command_lines_are_refused(monkeypatch, capsys, given, message):
    monkeypatch.chdir(ROOT)
    config = [] if given[0].startswith("--config=") else ["--config=configs/shapes.py"]
    with pytest.raises(SystemExit) as end:
        read([*config, *given])
    said = capsys.readouterr().err
    assert end.value.code == 2 and message in said and said.count("\n") == 1


def test_a_configuration_by_its_name_takes_changes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given, run = read(["--config", "shapes:literal", "--config.steps=70", "--config.tensorboard"])
    assert (run.steps, run.policy.stop, run.tensorboard) == (70, "softmax", True)
    assert given.workdir == Path("runs/shapes-literal")


def test_the_command_is_shown_as_it_was_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval.py", "--policy", "a b"])
    assert command() == "python eval.py --policy 'a b'"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/stepprune-eval", "--config=shapes"])
    assert command() == "stepprune-eval --config=shapes"


def test_as_many_devices_as_cores_are_asked_for():
    with pytest.raises(ValueError, match=r"config\.cpu_devices is -1, expected an integer"):
        use_cores(-1)
    with pytest.raises(ValueError, match=r"cpu_devices is 99999, expected an integer from 0 to"):
        use_cores(99_999)
    before = jax.config.jax_num_cpu_devices
    use_cores(0)
    assert jax.config.jax_num_cpu_devices == before
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import jax\n"
            "from stepprune_jax.parallel.distributed import use_cores\n"
            "use_cores(3); print(jax.device_count())",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
    )
    assert found.stdout == "3\n", found.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:", r"mistaken\d.py, line 1: SyntaxError: invalid syntax"),
        (
            "def get_config():\n    return undefined",
            r"mistaken\d.py, line 2: NameError: name 'unde",
        ),
        ("def get_config():\n    return 1 / 0", r"line 2: ZeroDivisionError: division by zero"),
        (
            "def get_config():\n    return {}",
            r"a get_config that returns settings, not dict",
        ),
        ("x = 1", r"mistaken\d.py: expected a get_config that returns settings"),
        ("def get_config():\n    int('x')", r"mistaken\d.py: invalid literal"),
        ("import absent_package", r"mistaken\d.py, line 1: ModuleNotFoundError: No module named"),
    ],
)
def test_mistakes_in_a_configuration_file_are_reported_with_their_line(tmp_path, text, message):
    path = tmp_path / f"mistaken{len(text) % 10}.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        configurations.load(str(path))


# One process for all: most of its time goes into imports.
RUN_ALL = """
import runpy, sys
for line in sys.stdin.read().splitlines():
    name, *sys.argv[1:] = line.split()
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        print(end.code)
"""


def test_the_programs_end_with_one_line(tmp_path):
    shapes, pretrain = "configs/shapes.py", "experiments/configs/pretrain_shapes.py"
    # Evaluation last: it starts jax, after which pretraining could not choose its devices.
    lines = [
        f"train.py --workdir={tmp_path} --config={shapes} --config.steps=0",
        f"experiments/pretrain/__main__.py --workdir={tmp_path} --config={pretrain} "
        f"--config.data.folder={tmp_path}",
        f"eval.py --workdir={tmp_path} --config={shapes}",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input="\n".join(lines),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.split() == ["2"] * 3
    train, pretrain, evaluate = ended.stderr.splitlines()
    assert train == "train.py: error: config.steps is 0, expected an integer from 1, below 2**31"
    assert evaluate.startswith(f"eval.py: error: {tmp_path}/policy.safetensors does not")
    assert pretrain == f"experiments.pretrain: error: no file at {tmp_path}/train.json"


def test_a_run_has_a_folder_of_its_configuration_unless_it_is_given_one():
    assert default_workdir("configs/llava7b.py") == "runs/llava7b"
    assert default_workdir("/x/configs/llava7b.py:literal") == "runs/llava7b-literal"


KEPT = """
import jax
from stepprune_jax import command_line
command_line.Parser(compiles=True).parse_args()
jax.jit(lambda x: x @ x)(jax.numpy.ones((3, 3)))
print(jax.config.jax_compilation_cache_dir)
"""


def test_commands_keep_compiled_programs_in_the_users_cache(tmp_path):
    own = {"XDG_CACHE_HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    command = [sys.executable, "-c", KEPT]
    said = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(tmp_path / "stepprune_jax")


@pytest.mark.parametrize(
    ("flags", "folder"),
    [(["--no_compile_cache"], None), ([], "own"), (["--no_compile_cache"], "own")],
)
def test_a_folder_for_programs_that_jax_has_is_left_to_it(flags, folder):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder)
    try:
        Parser(compiles=True).parse_args(flags)
        assert jax.config.jax_compilation_cache_dir == folder
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
