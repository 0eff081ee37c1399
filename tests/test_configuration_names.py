"""Loading of configurations by name, independent of the working directory."""

import pytest

from stepprune_jax import configurations


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", configurations.names())
def test_a_name_and_its_path_give_equal_configurations(name, pytestconfig):
    path = pytestconfig.rootpath / "configs" / f"{name}.py"
    assert configurations.load(name) == configurations.load(str(path))


def test_an_argument_is_passed_to_the_file(pytestconfig):
    file = pytestconfig.rootpath / "configs" / "llava7b.py"
    assert configurations.find("llava7b:literal") == (file, "literal")
    assert configurations.find(f"{file}:literal") == (file, "literal")
    literal = configurations.load("qwen25vl_3b:literal")
    assert literal.policy.stop == "softmax" and "Qwen2.5-VL-3B" in literal.model.folder
    with pytest.raises(ValueError, match=r"the argument of shapes is .loose.,"):
        configurations.load("shapes_qwen:loose")


def test_a_users_file_may_build_on_a_named_configuration(tmp_path):
    (tmp_path / "custom.py").write_text(
        "from stepprune_jax import configurations\n"
        'def get_config(arg=""):\n'
        '    run = configurations.load(f"shapes:{arg}")\n'
        '    return run.replace({"steps": 70})\n'
    )
    run = configurations.load("custom.py:literal", ["batch_size=4"])
    assert (run.steps, run.batch_size, run.policy.stop) == (70, 4, "softmax")


def test_the_error_for_an_unknown_configuration_lists_the_names(tmp_path):
    (tmp_path / "folder.py").mkdir()
    for name in ("nonsense", "configs/shapes", "shapes.py:literal", "folder.py", ""):
        with pytest.raises(FileNotFoundError, match=r"no configuration file .* llava7b, ") as error:
            configurations.find(name)
        assert "\n" not in str(error.value)
