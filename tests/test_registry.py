"""A user's own pruning class is used wherever a command's user names a pruner."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from generation_reference import random_image
from pages import ROOT, blocks
from small_world import changed, small_run
from views import view

from stepprune_jax import registry
from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import claim
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.cli import generate
from stepprune_jax.demo.compare import list_choices
from stepprune_jax.efficiency.rows import read_rows
from stepprune_jax.evaluation.rows import Conditions, plan_rows
from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.integrations.answerer import AnswererOptions, load_answerer
from stepprune_jax.pruning import Budget
from stepprune_jax.registry import PRUNERS, build_pruner, resolve_pruner, user_digest
from stepprune_jax.user_input import UserError

NORM = next(block for block in blocks(ROOT / "docs/pruners.md") if "class Norm" in block).lstrip()
USER_MODULES = ("norm", "other", "mine", "my_base", "my_pruners")  # modules that the tests write
FIRST_LINES = """
import dataclasses
from stepprune_jax.pruning import AllTokens, Pruner, Ranker
frozen = dataclasses.dataclass(frozen=True)
"""


@pytest.fixture(autouse=True)
def forget():
    """Returns a function that removes the classes of a test; calls it after the test."""
    built_in_pruners, module_names = dict(PRUNERS), {*sys.modules}

    def remove_user_classes():
        PRUNERS.clear()
        PRUNERS.update(built_in_pruners)
        registry._USER_CLASSES.clear()
        for name in {*sys.modules} - module_names:
            if name.startswith(USER_MODULES):
                del sys.modules[name]

    yield remove_user_classes
    remove_user_classes()


@pytest.fixture
def write(tmp_path):
    """Writes a Python file and returns its path."""

    def write_file(code, name="norm.py"):
        file = tmp_path / name
        file.write_text(code)
        return file

    return write_file


@pytest.fixture
def norm(write):
    """Returns the text that names the pruner of the page."""
    return f"{write(NORM)}:Norm"


def test_the_class_of_the_page_has_at_most_twenty_lines():
    assert len(NORM.splitlines()) <= 20


def test_a_class_in_a_file_becomes_a_pruner_with_its_fields_as_options(norm):
    assert resolve_pruner(norm) == resolve_pruner(norm) == "norm"
    pruner = build_pruner("norm", 4, options={"order": "1"})
    assert type(pruner) is PRUNERS["norm"]
    assert (pruner.order, pruner.budget) == (1.0, Budget("count", 4))
    with pytest.raises(UserError, match="norm has no option 'ord'; its options: order"):
        build_pruner("norm", 4, options={"ord": 1})


def test_a_class_in_a_module_of_the_working_directory_becomes_a_pruner(
    write, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_pruners").mkdir()
    write("from __future__ import annotations\n" + NORM, "my_pruners/largest.py")
    assert resolve_pruner("my_pruners.largest:Norm") == "norm"
    assert build_pruner("norm", 4, options={"order": "1"}).order == 1.0


def test_names_of_pruners_are_not_changed():
    assert [resolve_pruner(name) for name in (None, "grid", "gird", "")] == [
        None,
        "grid",
        "gird",
        "",
    ]


def test_a_class_without_a_label_has_its_name_as_the_label(write):
    file = write(f"{FIRST_LINES}@frozen\nclass Mine(AllTokens):\n    name = 'mine'\n")
    assert PRUNERS[resolve_pruner(f"{file}:Mine")].label == "mine"


@pytest.mark.parametrize("reference", ["norm.py", "norm.py:", ":Norm", "a b:Norm", "norm.py:a.b"])
def test_a_text_that_is_not_a_class_is_refused(reference):
    with pytest.raises(UserError, match=r"is not a class, expected FILE\.py:CLASS or pack"):
        resolve_pruner(reference)


def test_missing_files_modules_and_classes_are_refused(norm, tmp_path):
    file = norm.removesuffix(":Norm")
    for reference, problem in (
        (f"{tmp_path}/none.py:Norm", f"there is no file {tmp_path}/none.py"),
        ("no_such_package.norm:Norm", "there is no module no_such_package.norm, installed or in"),
        ("json.norm:Norm", "there is no module json.norm, installed or in"),
        (f"{file}:Norn", f"there is no class Norn in {file}. Did you mean Norm?"),
        (f"{file}:by_score", f"there is no class by_score in {file}."),
    ):
        with pytest.raises(UserError) as caught:
            resolve_pruner(reference)
        assert str(caught.value).startswith(f"the pruner {reference!r}: {problem}")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("class Mine:\n    name = 'mine'", "Mine is not a pruner, expected a subclass of Ranker"),
        (
            "class Mine(AllTokens):\n    name = 'mine'\n    scale: int = 2",
            "Mine is not a frozen dataclass, expected @dataclasses.dataclass(frozen=True) above",
        ),
        (
            "@dataclasses.dataclass\nclass Mine(AllTokens):\n    name = 'mine'",
            "{file}, line 5: TypeError: cannot inherit non-frozen dataclass from a frozen one",
        ),
        ("@frozen\nclass Mine(Ranker):\n    name = 'mine'", "Mine does not define rank"),
        ("@frozen\nclass Mine(Pruner):\n    pass", "Mine has no name, expected one such as"),
        (
            "@frozen\nclass Mine(Pruner):\n    name = 'My method'",
            "Mine.name is 'My method', expected lower-case letters, digits, _ and -",
        ),
        ("@frozen\nclass Mine(Pruner):\n    name = 'policy'", "Mine.name is 'policy', expected"),
        (
            "@frozen\nclass Mine(Pruner):\n    name = 'fastv'",
            "Mine.name is 'fastv', the name of a built-in pruner; choose another",
        ),
        (
            "@frozen\nclass Mine(Pruner):\n    name, label = 'mine', 'fastv'",
            "Mine.label is 'fastv', the label of a built-in pruner; choose another",
        ),
        (
            "@frozen\nclass Mine(Pruner):\n    name = 'mine'\n    size: 'Size' = 2",
            "the type of an option of Mine is unknown: name 'Size' is not defined",
        ),
        ("two = 1 +", "{file}, line 5: SyntaxError: invalid syntax"),
        ("two = three", "{file}, line 5: NameError: name 'three' is not defined"),
        ("import no_such_package", "{file}, line 5: ModuleNotFoundError: No module named"),
    ],
)
def test_a_class_that_commands_cannot_use_is_refused(code, problem, write):
    file = write(f"{FIRST_LINES}{code}\n")
    with pytest.raises(UserError) as caught:
        resolve_pruner(f"{file}:Mine")
    assert str(caught.value).startswith(f"the pruner '{file}:Mine': {problem.format(file=file)}")
    assert "\n" not in str(caught.value) and "mine" not in PRUNERS


def test_two_classes_with_one_name_are_refused(norm, write):
    resolve_pruner(norm)
    with pytest.raises(UserError, match=r"Norm\.name is 'norm', the name of another class"):
        resolve_pruner(f"{write(NORM, 'other.py')}:Norm")


def test_the_digest_covers_the_base_classes_outside_the_package(write):
    base = write(f"{FIRST_LINES}@frozen\nclass Base(AllTokens):\n    name = 'base'\n", "my_base.py")
    code = "from my_base import Base, frozen\n@frozen\nclass Mine(Base):\n    name = 'mine'\n"
    file = write(code, "mine.py")
    name = resolve_pruner(f"{file}:Mine")
    contents = file.read_bytes() + b"\n" + base.read_bytes()
    assert user_digest(name) == hashlib.sha256(contents).hexdigest()[:16]
    assert user_digest("grid") is None


@pytest.fixture
def without_questions(monkeypatch):
    """Evaluations read no data folder."""
    monkeypatch.setattr(EvaluationRun, "questions", lambda *_: [])


@pytest.mark.usefixtures("without_questions")
def test_an_evaluation_has_rows_of_a_class_with_its_options_and_digest(norm, tmp_path):
    methods = f"all,grid,{norm}"
    run = small_run("model", "data", methods=methods, options=f"{norm} order=1", budgets=(4,))
    source = inspect_folder("shapes")
    rows = plan_rows(run.eval, source.config, {}, {}, 0)
    assert [row.label for row in rows] == ["all tokens", "grid", "largest norm"]
    assert rows[-1].pruner.order == 1.0

    files = Conditions(run, source, {}, tmp_path).files(rows, BENCHMARKS["folder"], [])
    made = files[-1].provenance.made
    assert (made["source"], made["options"]) == (user_digest("norm"), {"order": 1.0})
    assert "source" not in files[1].provenance.made


@pytest.mark.usefixtures("without_questions")
def test_answers_of_a_changed_file_are_not_continued(norm, tmp_path, forget):
    """The resolved class stays the same in a process, so `forget` stands for a new process."""

    def answer_file():
        run = small_run("model", "data", methods=norm, budgets=(4,))
        conditions = Conditions(run, inspect_folder("shapes"), {}, tmp_path)
        (file,) = conditions.files(conditions.rows({}), BENCHMARKS["folder"], [])
        return file

    file = answer_file()
    claim(file)
    file.path.touch()
    old_digest, path = user_digest("norm"), Path(norm.removesuffix(":Norm"))
    path.write_text(NORM.replace("[:, :steps]", "[:, ::-1][:, :steps]"))
    claim(answer_file())  # the class of this process has not changed
    forget()
    with pytest.raises(UserError, match=f"provenance.*source: '{old_digest}' -> '"):
        claim(answer_file())


def test_an_evaluation_refuses_a_class_in_one_line(tmp_path):
    file = f"{tmp_path}/none.py"
    with pytest.raises(UserError) as caught:
        changed(small_run("model", "data"), methods=f"all,{file}:Norm")
    problem = f"the pruner '{file}:Norm': there is no file {file}"
    assert str(caught.value) == f"config.eval.methods: {problem}"


def test_a_row_of_the_efficiency_table_may_be_a_class(norm):
    config = inspect_folder("shapes").config
    (row,) = read_rows([f"{norm}@4 order=1"], config, decoder_layers=1, dtype="float32")
    assert (row.pruner.name, row.pruner.order) == ("norm", 1.0)
    assert row.budget == Budget("count", 4)


def test_generate_answers_with_a_class(norm, llava_folder, tmp_path, capsys):
    random_image(1).save(tmp_path / "1.png")
    flags = f"--model {llava_folder} --image {tmp_path}/1.png --prompt dog? --dtype float32 --json"
    flags += f" --pruner {norm} --budget 5 --pruner_options order=1 --max_tokens 2"
    generate.main(flags.split())
    answer = json.loads(capsys.readouterr().out)
    assert (answer["pruner"], answer["kept"]) == ("norm", 5)
    assert answer["pruner_source"] == user_digest("norm")


def test_lmms_eval_and_the_demo_use_a_class(norm, llava_folder):
    settings = AnswererOptions(pretrained=llava_folder, dtype="float32", method=norm, budget=4)
    answerer = load_answerer(settings)
    assert type(answerer.generator.pruner) is PRUNERS["norm"]
    assert "norm" in list_choices(answerer.generator.model, {})


def test_the_mask_of_a_pruner_is_always_an_array():
    assert view(np.zeros((2, 3, 4)), count=1).valid.tolist() == [[True] * 3] * 2
    mask = [[True, True, False], [True] * 3]
    assert view(np.zeros((2, 3, 4)), count=1, valid=mask).valid.tolist() == mask
