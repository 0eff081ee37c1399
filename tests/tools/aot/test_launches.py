"""What the host starts on a GPU, read off XLA's dump of the programs that answer."""

import dataclasses

import pytest
from aot_targets import made

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


def test_thunks_are_counted_by_who_starts_them():
    assert launches(TEXT) == Launches(("kCopy", "kCommandBuffer"), 4)
    with pytest.raises(UserError, match="sequence of thunks"):
        launches("HloModule")


def compiled(to, traced, name, folder):
    """What a compiled program starts."""
    dump = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    program = to._replace(options=to.options | dump).compile(traced.trace(name).lower())
    (file,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
    found = launches(file.read_text(encoding="utf-8"))
    kernels = count_kernels(program.as_text())
    loops = file.read_text(encoding="utf-8").count("kWhile")
    assert kernels > found.kernels if loops else kernels == found.kernels
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory, pytestconfig):
    """Programs for a card of a small model, whose layers count as large."""
    folder = testing.tiny_llava(tmp_path_factory.mktemp("model"), vision={"image_size": 84})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "_LARGE_LAYER_BYTES", 0)
        patch.chdir(pytestconfig.rootpath)
        patch.syspath_prepend(str(pytestconfig.rootpath))
        run = configurations.load("configs/shapes.py")
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, folder=str(folder)))
        to = made("h200")
        yield to, Programs(run, build_mesh("single", to.devices), "bfloat16")


@pytest.mark.parametrize("name", ["answer 1", "select own 1", "prefill", "decode"])
def test_a_program_of_an_answer_is_one_cuda_graph(programs, name, tmp_path):
    """An exact count is one program to the first token, an own stop two, a decoded token one."""
    assert compiled(*programs, name, tmp_path).host == ("kCommandBuffer",)


@pytest.mark.parametrize(("name", "a_layer", "besides"), [("decode", 14, 21), ("prefill", 15, 29)])
def test_kernels_of_a_layer_as_wide_as_llava_7b_s(name, a_layer, besides, tmp_path, monkeypatch):
    """Two and three layers of its language model differ by the kernels of one."""
    to, counts = made("h200"), []
    whole = find_backbone("llava-7b")
    for layers in (2, 3):
        text = dataclasses.replace(whole.config.text, num_layers=layers)
        few = whole.replace(text=text)
        monkeypatch.setattr(module, "backbone_of", lambda run, few=few: few)
        run = configurations.load("configs/llava7b.py")
        traced = Programs(run, build_mesh("single", to.devices), "bfloat16")
        counts.append(compiled(to, traced, name, tmp_path / str(layers)).kernels)
    assert counts == [besides + 2 * a_layer, besides + 3 * a_layer]
