import pytest
from small_world import ROOT, small_run

from stepprune_jax import load_policy
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.evaluation.rows import plan_rows
from stepprune_jax.evaluation.settings import read_policies


@pytest.mark.parametrize(
    "fields",
    [
        {"budgets": (3, 3)},
        {"benchmarks": "pope,popes"},
        {"methods": "grid,step"},
        {"options": "stepprune group=2"},
        {"rows": {"StepPrune": "x"}},
    ],
)
def test_the_error_names_a_bad_setting(fields):
    with pytest.raises(ValueError, match=f"config.eval.{next(iter(fields))}"):
        small_run("model", "data", **fields)


def test_the_error_names_an_unknown_method_and_a_similar_one():
    rows = {"mine": "x"}
    with pytest.raises(ValueError, match=r"^config.eval.methods is 'gird', expected") as error:
        small_run("model", "data", methods="all,gird", rows=rows)
    assert str(error.value).endswith(
        "visionselector, glimpseprune, stepprune, mine, or a class of yours as FILE.py:CLASS. "
        "Did you mean grid?"
    )


def test_options_of_a_trained_method_apply_to_its_rows():
    config = inspect_folder("shapes").config
    policies = {"scorer": load_policy(ROOT / "experiments/policies/autoselect.safetensors")}
    settings = small_run("model", "data", options="autoselect diversity=0.2", budgets=(4,)).eval
    (row,) = [r for r in plan_rows(settings, config, policies, {}, 0) if r.policy is not None]
    assert row.pruner.diversity == 0.2
    assert row.pruner.config == policies["scorer"].config


def test_methods_may_be_names_of_pruners_or_labels():
    rows = {"AutoSelect-like": "x", "StepPrune literal": "y"}
    methods = "grid,fastv,visionzip,stepprune,AutoSelect"
    settings = small_run("model", "data", methods=methods, rows=rows).eval
    expected = ["grid", "FastV", "VisionZip", "AutoSelect-like", "StepPrune"]
    assert [label for label in settings.labels if settings.is_selected(label)] == expected


@pytest.fixture
def policies(tmp_path):
    def read(policy=None, **fields):
        return read_policies(small_run("model", "data", **fields).eval, tmp_path, policy)

    return read


def test_a_missing_policy_is_an_error_only_if_its_row_is_named(policies, capsys):
    assert [*policies("shapes", rows={"mine": "nowhere"})] == ["StepPrune"]
    assert "no row 'mine': no policy file at nowhere" in capsys.readouterr().out
    assert not policies(methods="grid", rows={"mine": "nowhere"})
    for arguments in ({}, {"methods": "stepprune"}, {"policy": "nowhere"}):
        with pytest.raises(FileNotFoundError, match=r"--policy|no policy file at nowhere"):
            policies(**arguments)
    with pytest.raises(FileNotFoundError, match="row 'mine': no policy file at nowhere"):
        policies(methods="mine", rows={"mine": "nowhere"})


def test_the_row_of_the_run_has_the_name_of_its_method(policies, tmp_path):
    scorer = load_policy(ROOT / "experiments/policies/autoselect.safetensors")
    save_policy(scorer, tmp_path / "policy.safetensors")
    rows = {"AutoSelect-like": "nowhere", "mine": "shapes"}
    assert [*policies()] == [*policies(methods="all,autoselect")] == ["AutoSelect-like"]
    # The policy of the run replaces the row with the name of its method.
    assert [*policies(rows=rows)] == ["mine", "AutoSelect-like"]
    assert [*policies("shapes", rows={"mine": "shapes"})] == ["mine", "StepPrune"]
    assert [*policies(methods="stepprune,autoselect")] == ["AutoSelect-like"]
    with pytest.raises(
        ValueError, match=r"config.eval.methods is 'stepprune', expected AutoSelect"
    ):
        policies(methods="stepprune")
