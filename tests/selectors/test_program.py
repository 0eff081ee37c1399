"""Exported programs, which run without this package."""

import functools
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import export

import stepprune_jax as sp

pytest.importorskip("flatbuffers")

# In another process, because the tests' type checks do not accept symbolic sizes.
WRITE = """
import json, sys
import stepprune_jax as sp
policy, programs = sys.argv[1:]
for path, how in json.loads(programs).items():
    sp.load_policy(policy).export(path, num_tokens=12, num_words=5, **how)
"""
ELSEWHERE = """
import sys
sys.modules["stepprune_jax"] = None
import jax, numpy as np
from jax import export
given = [np.load(file) for file in ("1.npz", "3.npz")]
for path in sys.argv[1:]:
    program = export.deserialize(bytearray(open(path, "rb").read()))
    for batch in given:
        kept = program.call(batch["image"], batch["text"], batch["text_mask"])
        np.savez(f"{path}.{len(batch['image'])}.npz", **kept)
"""


def run(folder, program, *arguments):
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, cwd=folder)


@pytest.fixture(scope="module")
def policy():
    sizes = {"feature_width": 16, "text_width": 8, "width": 8, "num_heads": 2}
    config = sp.PolicyConfig(encoder_layers=1, **sizes)
    return sp.StepPrune.init(jax.random.key(0), config, sp.FeatureStats.start(16))


@pytest.mark.slow
def test_an_exported_program_equals_the_policy_for_any_batch_size(policy, tmp_path):
    programs = {"a/budget": {"budget": 3}, "a/own_stop": {}}
    sp.save_policy(policy, tmp_path / "policy.safetensors")
    run(tmp_path, WRITE, "policy.safetensors", json.dumps(programs))
    batches = {}
    for rows in (1, 3):
        image = 3 * jax.random.normal(jax.random.key(1), (rows, 12, 16))
        text = jax.random.normal(jax.random.key(2), (rows, 5, 8))
        mask = np.arange(5) < np.array([[4], [5], [2]])[:rows]
        batches[rows] = {"image": image, "text": text, "text_mask": mask}
        np.savez(tmp_path / f"{rows}.npz", **batches[rows])
    run(tmp_path, ELSEWHERE, *programs)
    for path, options in programs.items():
        select = jax.jit(
            functools.partial(policy.select, capacity=options.get("budget", 6), **options)
        )
        for rows, batch in batches.items():
            expected = select(**batch)._asdict()
            kept = np.load(tmp_path / f"{path}.{rows}.npz")
            assert set(kept) == set(expected)
            for name, value in expected.items():
                np.testing.assert_array_equal(kept[name], value, err_msg=f"{path}, {name}")


def test_a_program_for_one_platform_and_batch_has_static_shapes(policy, tmp_path):
    options = {"num_tokens": 12, "num_words": 5, "budget": 3}
    path = policy.export(tmp_path / "cuda", batch=4, platforms=("cuda",), **options)
    program = export.deserialize(bytearray(path.read_bytes()))
    assert program.platforms == ("cuda",)
    assert [aval.shape for aval in program.in_avals] == [(4, 12, 16), (4, 5, 8), (4, 5)]
    assert "tensor<?" not in program.mlir_module()
    limits = {"num_tokens": 12, "num_words": 5, "min_tokens": 9, "max_steps": 12}
    path = policy.export(tmp_path / "long", batch=4, **limits)
    assert export.deserialize(bytearray(path.read_bytes())).out_avals[1].shape == (4, 12)
