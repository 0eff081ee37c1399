"""Commands, flags, settings and dotted names in the documentation exist."""

import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import re
import tomllib

import pytest
from pages import NOTEBOOKS, PAGES, ROOT, commands, prose, shown

from stepprune_jax import configurations

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OURS = r"(?:stepprune_jax|experiments|tools|sp)"
DOTTED = re.compile(rf"(?<![\w./~\"-])({OURS}(?:\.\w+)+)(?![\w/-]|\.py)")


@functools.cache
def flags_of(module, *subcommand):
    """Returns the flags in the help text of a program."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        importlib.import_module(module).main([*subcommand, "--help"])
    return {*re.findall(r"(?<![\w-])(--\w+)", out.getvalue())}


def module_of(words):
    """Returns the module that a command runs, and its arguments; None for foreign programs."""
    program, *arguments = words
    if program in SCRIPTS:
        module, _, function = SCRIPTS[program].partition(":")
        assert callable(getattr(importlib.import_module(module), function)), program
        return f"stepprune_jax.cli.{function}", arguments
    if program.startswith("stepprune-"):
        raise AssertionError(f"no command {program}")
    if program != "python":
        return None
    if arguments[0] == "-m" and re.fullmatch(rf"{OURS}\..*", arguments[1]):
        module = arguments[1]
        if module == "stepprune_jax.efficiency":
            return "stepprune_jax.cli.efficiency", arguments[2:]
        package = importlib.util.find_spec(module).submodule_search_locations
        return f"{module}.__main__" if package else module, arguments[2:]
    if arguments[0] in ("train.py", "eval.py"):
        assert (ROOT / arguments[0]).is_file()
        name = "train" if arguments[0] == "train.py" else "evaluate"
        return f"stepprune_jax.cli.{name}", arguments[1:]
    return None


def check_settings(arguments):
    """Checks that a command's configuration exists and accepts the changes of its flags.

    Changes with placeholders, or with the file that docs/pruners.md asks to write, are skipped.
    """
    changes = [word[len("--config.") :] for word in arguments if word.startswith("--config.")]
    names = [value for flag, value in itertools.pairwise(arguments) if flag == "--config"]
    is_incomplete = any("{" in change or "norm.py:" in change for change in changes)
    if names and names[0] != "configs/mine.py" and not is_incomplete:
        configurations.load(names[0], [change for change in changes if "=" in change])


# Commands in RESULTS.md need not exist any more: they run at the commit that the page names.
CURRENT_PAGES = [page for page in (*PAGES, *NOTEBOOKS) if page.name != "RESULTS.md"]
COMMANDS = [
    pytest.param(words, id=f"{shown(page)}-{' '.join(words)[:40]}")
    for page in CURRENT_PAGES
    for words, _ in commands(page)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_and_its_flags_exist(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words and words[0] == "make":
        assert words[1] in TARGETS
    run = module_of(words) if words else None
    if run is None:
        return
    module, arguments = run
    subcommand = arguments[:1] if module.endswith((".score", ".convert")) else []
    flags = {re.match(r"--\w+", word)[0] for word in arguments if word.startswith("--")}
    assert flags <= flags_of(module, *subcommand)
    check_settings(arguments)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=shown)
def test_targets_and_commands_in_text_exist(page):
    text = prose(page)
    assert {*re.findall(r"`make ([a-z-]+)[` ]", text)} <= TARGETS
    assert {*re.findall(r"`(stepprune-[a-z]+)\b", text)} <= SCRIPTS.keys()


def resolves(name):
    """Returns whether a dotted name is a module or an attribute in one."""
    parts = re.sub(r"^sp\.", "stepprune_jax.", name).split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if module.startswith(error.name):
                continue
            return module == name  # our module exists, but imports a missing optional package
        for part in parts[length:]:
            value = getattr(value, part, None)
        return value is not None
    return False


def texts():
    """Yields name and text of the pages, of the project's settings and of the library's code."""
    for page in CURRENT_PAGES:
        yield shown(page), prose(page)
    settings = (ROOT / name for name in ("pyproject.toml", "Makefile", "setup.py"))
    for file in (*settings, *(ROOT / "stepprune_jax").rglob("*.py")):
        yield shown(file), file.read_text(encoding="utf-8")


def test_dotted_names_in_text_resolve():
    names = {(file, name) for file, text in texts() for name in DOTTED.findall(text)}
    assert len(names) > 100
    assert not [(file, name) for file, name in sorted(names) if not resolves(name)]
