"""Commands parse their flags before they import jax, and end on Ctrl-C in one line."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import LONGEST, run_python

from stepprune_jax.cli import choices
from stepprune_jax.efficiency import model_shapes
from stepprune_jax.models import int8, stack
from stepprune_jax.parallel import sharding
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.pruning import POSITIONS
from stepprune_jax.registry import PRUNERS

ROOT = Path(__file__).parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
# Runs all console scripts with the same flag, and prints the status of each.
RUN_SCRIPTS = """
import sys
from stepprune_jax import extras
*functions, flag = sys.argv[1:]
for function in functions:
    sys.argv = [f"stepprune-{function}", flag]
    try:
        getattr(extras, function)()
    except SystemExit as end:
        print("status", end.code)
print("imported", {"absl", "flax", "jax", "ml_collections", "transformers"} & {*sys.modules})
"""


@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--bugdet=3", 2)])
def test_flags_are_parsed_before_jax_is_imported(flag, status):
    functions = [entry.partition(":")[2] for entry in SCRIPTS.values()]
    process = run_python("-c", RUN_SCRIPTS, *functions, flag)
    lines = process.stdout.splitlines()
    assert lines.count(f"status {status}") == len(functions), process.stderr
    assert lines[-1] == "imported set()"
    assert len(process.stderr.splitlines()) == (0 if status == 0 else len(functions))


def test_flags_offer_the_values_of_the_library():
    assert (*PRUNERS,) == choices.PRUNERS
    assert choices.POSITIONS == POSITIONS
    assert choices.ATTENTIONS == stack.ATTENTIONS
    assert choices.ATTENTIONS[0] == stack.Execution().attention
    assert choices.WEIGHTS == int8.WEIGHTS
    assert choices.MESHES == sharding.PRESETS
    assert (*model_shapes.KNOWN,) == choices.MODEL_SHAPES
    assert PolicyConfig().decoder_layers == choices.DECODER_LAYERS


# Starts `stepprune-table` with another command, or with another import system.
START = """
import gc, hashlib, signal, sys, time, types
from stepprune_jax import extras

def wait_in_python(*_):
    print("ready", flush=True)
    time.sleep(600)

def wait_in_a_library():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)

def wait_in_a_destructor(*_):
    destroyed = type("Destroyed", (), {"__del__": wait_in_python})()
    del destroyed
    time.sleep(600)

def wait_in_the_garbage_collector():
    def _xla_gc_callback(*_):  # the name of jax's callback
        gc.callbacks.remove(_xla_gc_callback)
        print("ready", flush=True)
        time.sleep(1)
    gc.callbacks.append(_xla_gc_callback)
    try:  # The collection continues after its callback, and may be interrupted.
        gc.collect()
        time.sleep(600)
    except KeyboardInterrupt:
        print("reacted", flush=True)
        raise

class SlowImport:
    @staticmethod
    def find_spec(name, *_):
        if name == slow_module:
            wait()

def replace_command(main):
    from stepprune_jax.cli.command_line import exit_with  # imports more than SlowImport delays
    command = types.SimpleNamespace(command=lambda: exit_with("stepprune-table", main))
    sys.modules["stepprune_jax.cli.table"] = command

sys.argv = ["stepprune-table", "RUN"]
"""


# Import of a module that takes long.
SLOW = "sys.meta_path.insert(0, SlowImport)"
TABLE, START_MODULE = map(repr, ("stepprune_jax.cli.table", "stepprune_jax.cli.start"))


def interrupt(code):
    """Runs a program, and interrupts it when it is ready; returns its outputs and its status."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=LONGEST)
        finally:
            process.kill()
    return output, errors, process.returncode


@pytest.mark.parametrize(
    "wait",
    [
        f"slow_module, wait = {TABLE}, wait_in_python; {SLOW}",
        f"slow_module, wait = {START_MODULE}, wait_in_python; {SLOW}",
        # Python drops an error that is raised in a destructor.
        f"slow_module, wait = {START_MODULE}, wait_in_a_destructor; {SLOW}",
        "replace_command(wait_in_python)",
        "replace_command(wait_in_a_library)",
        "sys.unraisablehook = lambda _: None; replace_command(wait_in_a_destructor)",
    ],
)
def test_an_interrupt_ends_a_command_in_one_line(wait):
    output, errors, status = interrupt(f"{START}\n{wait}\nextras.table()")
    assert output == "" and errors == "stepprune-table: interrupted\n"
    assert status == 130


def test_an_interrupt_during_garbage_collection_is_raised_after_it():
    """Python drops errors of callbacks, so the command would continue."""
    replacement = "replace_command(wait_in_the_garbage_collector)"
    output, errors, _ = interrupt(f"{START}\n{replacement}\nextras.table()")
    assert output == "reacted\n" and errors == "stepprune-table: interrupted\n"


def test_scripts_import_few_modules_before_they_handle_interrupts():
    code = "import sys; from stepprune_jax.extras import generate; print(*sys.modules)"
    process = run_python("-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}")
    assert not {"argparse", "email", "json", "logging", "socket", "ssl"} & {*process.stdout.split()}


def test_a_background_job_that_ignores_interrupts_still_ignores_them():
    print_handler = "replace_command(lambda: print(signal.getsignal(signal.SIGINT)))"
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    process = run_python("-c", f"{START}\n{ignore}\n{print_handler}\nextras.table()")
    assert process.stdout.strip() in ("1", "Handlers.SIG_IGN")
