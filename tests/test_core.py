"""Policies need only jax, and one-line errors name missing packages of other parts."""

import os

import pytest
from pages import ROOT
from processes import run_python

HEAVY = ("PIL", "absl", "flax", "matplotlib", "optax", "orbax", "tqdm", "transformers")
BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}));"

CORE = """
import tempfile
import jax
import stepprune_jax as sp
from stepprune_jax.registry import PRUNERS, build_pruner

policy = sp.load_policy("shapes")
image = jax.random.normal(jax.random.key(0), (2, 9, policy.config.feature_width))
text = jax.random.normal(jax.random.key(1), (2, 3, policy.config.text_width))
select = jax.jit(lambda policy, image, text: policy.select(image, text, capacity=4))
pruned = select(policy.with_budget(4), image, text)
assert pruned.count.tolist() == [4, 4]
again = sp.load_policy(sp.save_policy(policy, tempfile.mkdtemp() + "/policy.safetensors"))
assert again.config == policy.config and len(PRUNERS) > 10
build_pruner("fastv", budget=16)
"""


def test_policies_and_pruners_need_neither_flax_nor_pillow():
    process = run_python("-c", BLOCKED + CORE)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    "code, prefix, extra",
    [
        ("import stepprune_jax; stepprune_jax.load_vlm", "stepprune_jax.load_vlm: ", "vlm"),
        (
            "sys.argv = ['stepprune-train', '--config=shapes']\n"
            "from stepprune_jax.extras import train; train()",
            "stepprune-train: error: ",
            "train",
        ),
    ],
)
def test_a_one_line_error_names_a_missing_extra(code, prefix, extra):
    last_line = (
        run_python("-c", BLOCKED + code, folder=ROOT)
        .stderr.splitlines()[-1]
        .removeprefix("ImportError: ")
    )
    package = last_line.removeprefix(prefix).partition(" ")[0]
    assert package in HEAVY
    assert last_line == f'{prefix}{package} is not installed: pip install ".[{extra}]"'


def test_an_export_names_its_missing_extra_before_compiling():
    block = "import sys; sys.modules['flatbuffers'] = None;"
    export = "load_policy('shapes').export('x', num_tokens=9, num_words=3)"
    code = f"{block} import stepprune_jax; stepprune_jax.{export}"
    process = run_python("-c", code, folder=ROOT)
    last_line = process.stderr.splitlines()[-1]
    assert last_line.endswith('flatbuffers is not installed: pip install ".[export]"')


def test_an_example_names_its_missing_package():
    block = "import runpy, sys; sys.modules['optax'] = None;"
    path = os.path.join(ROOT, "examples", "own_model.py")
    process = run_python("-c", f"{block} runpy.run_path({path!r}, run_name='__main__')")
    assert process.stderr.splitlines() == [
        "error: this example trains with optax, which is not installed: pip install optax"
    ]


def test_errors_about_other_missing_modules_are_not_changed():
    from stepprune_jax.extras import explain

    error = ModuleNotFoundError("No module named 'unknown'", name="unknown.part")
    with pytest.raises(ModuleNotFoundError, match="unknown"):
        explain(error)
