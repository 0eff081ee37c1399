"""What a policy needs is jax; what is missing for the rest is said in one line."""

import subprocess
import sys

import pytest

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


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_policies_and_pruners_need_neither_flax_nor_pillow():
    done = run(BLOCKED + CORE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code, said",
    [
        ("import stepprune_jax; stepprune_jax.load_vlm", "stepprune_jax.load_vlm: "),
        ("from stepprune_jax.extras import train; train()", "error: "),
    ],
)
def test_a_missing_extra_is_named_in_one_line(code, said):
    last = run(BLOCKED + code).stderr.splitlines()[-1].removeprefix("ImportError: ")
    name = last.removeprefix(said).partition(" ")[0]
    assert name in HEAVY
    assert last == f"{said}{name} is not installed: pip install 'stepprune-jax[vlm]'"


def test_the_extra_of_an_export_is_named_before_it_is_compiled():
    block = "import sys; sys.modules['flatbuffers'] = None;"
    export = "load_policy('shapes').export('x', num_tokens=9, num_words=3)"
    last = run(f"{block} import stepprune_jax; stepprune_jax.{export}").stderr.splitlines()[-1]
    assert last.endswith("flatbuffers is not installed: pip install 'stepprune-jax[export]'")


def test_another_missing_module_is_not_taken_for_an_extra():
    from stepprune_jax.extras import explain

    error = ModuleNotFoundError("No module named 'unknown'", name="unknown.part")
    with pytest.raises(ModuleNotFoundError, match="unknown"):
        explain(error)
