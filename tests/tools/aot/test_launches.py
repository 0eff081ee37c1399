"""Launches of the programs of an answer on a GPU, read from XLA's dump."""

import dataclasses

import pytest
from aot_targets import find_target

from stepprune_jax import configurations, testing
from stepprune_jax.efficiency.kernels import count_kernels
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.models import stack
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.user_input import UserError
from tools.aot import programs as module
from tools.aot.hlo import Launches, launches
from tools.aot.programs import Programs

TEXT = """000: kCopy [source | next=001 (1)] kCopy
001: kCommandBuffer [prev=000 (1) | sink]
    002: kCustomKernel [source | next=003 (1)] fusion
    003: kWhile [prev=002 (1) | sink]
    condition:
        004: kCustomKernel [source | sink] compare
    body:
        005: kCustomKernel [source | sink] add
"""


def test_launches_match_a_worked_example():
    assert launches(TEXT) == Launches(("kCopy", "kCommandBuffer"), 4)
    with pytest.raises(UserError, match="sequence of thunks"):
        launches("HloModule")


def compiled(target, traced, name, folder):
    """Compiles a program, and returns its launches."""
    dump = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    program = target._replace(options=target.options | dump).compile(traced.trace(name).lower())
    (file,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
    program_launches = launches(file.read_text(encoding="utf-8"))
    kernels = count_kernels(program.as_text())
    loops = file.read_text(encoding="utf-8").count("kWhile")
    assert kernels > program_launches.kernels if loops else kernels == program_launches.kernels
    return program_launches


@pytest.fixture(scope="module")
def programs(tmp_path_factory, pytestconfig):
    """Programs of a small model for a GPU. Its layers count as large."""
    folder = testing.tiny_llava(tmp_path_factory.mktemp("model"), vision={"image_size": 84})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "_LARGE_LAYER_BYTES", 0)
        patch.chdir(pytestconfig.rootpath)
        patch.syspath_prepend(str(pytestconfig.rootpath))
        run = configurations.load("configs/shapes.py")
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, folder=str(folder)))
        target = find_target("h200")
        yield target, Programs(run, build_mesh("single", target.devices), "bfloat16")


@pytest.mark.parametrize("name", ["answer 1", "select own 1", "prefill", "decode"])
def test_a_program_of_an_answer_is_one_cuda_graph(programs, name, tmp_path):
    """An exact count needs one program up to the first token, and a learned stop needs two."""
    assert compiled(*programs, name, tmp_path).host == ("kCommandBuffer",)


@pytest.mark.parametrize(
    ("name", "layer_kernels", "other_kernels"), [("decode", 14, 21), ("prefill", 15, 29)]
)
def test_the_number_of_kernels_of_a_llava_7b_layer(
    name, layer_kernels, other_kernels, tmp_path, monkeypatch
):
    """Models with two and three layers differ by the kernels of one layer."""
    target, counts = find_target("h200"), []
    llava = find_backbone("llava-7b")
    for layers in (2, 3):
        text = dataclasses.replace(llava.config.text, num_layers=layers)
        shallow = llava.replace(text=text)
        monkeypatch.setattr(module, "backbone_of", lambda run, shallow=shallow: shallow)
        run = configurations.load("configs/llava7b.py")
        traced = Programs(run, build_mesh("single", target.devices), "bfloat16")
        counts.append(compiled(target, traced, name, tmp_path / str(layers)).kernels)
    assert counts == [other_kernels + 2 * layer_kernels, other_kernels + 3 * layer_kernels]
