"""Measures the host memory of the loader in a separate process."""

import json

import numpy as np
import pytest
from processes import run_python
from shards import write_index

from stepprune_jax import testing
from stepprune_jax.models import vlm
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.llava.config import LlavaConfig

# On the CPU backend, the loaded weights are also in host memory. The loader's own memory is the
# growth of the high-water mark beyond the size of the weights.
_MEASURE = """
import sys, jax, jax.numpy as jnp
from stepprune_jax.checkpoints import load
from stepprune_jax.checkpoints.folder import inspect_folder

def high_water():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

source = inspect_folder(sys.argv[1])
jnp.zeros(1).block_until_ready()
before = high_water()
params = jax.block_until_ready(load.load_params(source, weights=sys.argv[2], progress=False))
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(size, high_water() - before - size)
"""


def _write_sparse(folder, config):
    """Writes shards of zeros as sparse files, which take no disk, and returns the largest size."""
    backbone = Llava(config)
    targets = backbone.weight_targets(vlm.abstract_params(backbone))
    shapes = {name: target.tensor_shape for target in targets for name in target.names}
    sizes = {name: int(np.prod(shape)) * 2 for name, shape in shapes.items()}
    weight_map = {}
    for number, members in enumerate(np.array_split(list(shapes), 5)):
        header, end, file = {}, 0, f"model-{number}.safetensors"
        for name in members:
            begin, end = end, end + sizes[name]
            shape = list(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        raw = json.dumps(header).encode()
        with open(folder / file, "wb") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            handle.truncate(8 + len(raw) + end)
        weight_map |= dict.fromkeys(members, file)
    write_index(folder, weight_map)
    return max(sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["full", "int8"])
def test_host_memory_stays_below_the_largest_tensor_and_a_margin(tmp_path, weights):
    text = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 9,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    raw = testing.tiny_hf_config(8192, text=text)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    largest = _write_sparse(tmp_path, LlavaConfig.from_hf(raw))
    variables = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    run = run_python("-c", _MEASURE, tmp_path, weights, **variables)
    assert run.returncode == 0, run.stderr
    size, extra = map(int, run.stdout.split())
    # A loader that staged all weights would need another `size` bytes, more than the margin. With
    # int8, only the embeddings are ever complete in host memory.
    margin = 500_000_000 if weights == "full" else 150_000_000
    assert size > 2 * margin > largest
    assert extra < largest + margin, f"{extra / 1e6:.0f} MB beyond {size / 1e6:.0f} MB of weights"
