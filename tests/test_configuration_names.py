"""Configurations by name, in any folder."""

import pytest

from stepprune_jax import configurations


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", configurations.names())
def test_a_name_and_its_path_are_one_configuration(name, pytestconfig):
    found = configurations.load(name)
    assert found == configurations.load(str(pytestconfig.rootpath / "configs" / f"{name}.py"))


def test_an_argument_reaches_the_file(pytestconfig):
    file = pytestconfig.rootpath / "configs" / "llava7b.py"
    assert configurations.find("llava7b:literal") == (file, "literal")
    assert configurations.find(f"{file}:literal") == (file, "literal")
    literal = configurations.load("qwen25vl_3b:literal")
    assert literal.policy.stop == "softmax" and "Qwen2.5-VL-3B" in literal.model.folder
    with pytest.raises(ValueError, match=r"the argument of shapes is .loose.,"):
        configurations.load("shapes_qwen:loose")


def test_a_file_of_mine_builds_on_a_named_one(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from stepprune_jax import configurations\n"
        'def get_config(arg=""):\n'
        '    run = configurations.load(f"shapes:{arg}")\n'
        '    return run.replace({"steps": 70})\n'
    )
    found = configurations.load("mine.py:literal", ["batch_size=4"])
    assert (found.steps, found.batch_size, found.policy.stop) == (70, 4, "softmax")


def test_what_is_neither_file_nor_name_is_refused_with_the_names(tmp_path):
    (tmp_path / "folder.py").mkdir()
    for given in ("nonsense", "configs/shapes", "shapes.py:literal", "folder.py", ""):
        with pytest.raises(FileNotFoundError, match=r"no configuration file .* llava7b, ") as found:
            configurations.find(given)
        assert "\n" not in str(found.value)
