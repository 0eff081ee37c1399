"""What the host starts on a GPU, read off XLA's dump of the programs that answer."""

import dataclasses

import pytest
from aot_targets import made

from stepprune_jax import configurations, testing
from stepprune_jax.models import stack
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.user_input import UserError
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


@pytest.fixture(scope="module")
def programs(tmp_path_factory, pytestconfig):
    """Programs for a card of a small model, whose layers count as large."""
    folder = testing.tiny_llava(tmp_path_factory.mktemp("model"), vision={"image_size": 84})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "_LARGE", 0)
        patch.chdir(pytestconfig.rootpath)
        patch.syspath_prepend(str(pytestconfig.rootpath))
        run = configurations.load("configs/shapes.py")
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, folder=str(folder)))
        to = made("h200")
        yield to, Programs(run, build_mesh("single", to.devices), "bfloat16")


@pytest.mark.parametrize("name", ["answer 1", "select own 1", "prefill", "decode"])
def test_a_program_of_an_answer_is_one_cuda_graph(programs, name, tmp_path):
    """An exact count is one program to the first token, an own stop two, a decoded token one."""
    to, traced = programs
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    to = to._replace(options=to.options | dump)
    to.compile(traced.trace(name).lower())
    (file,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    assert launches(file.read_text(encoding="utf-8")).host == ("kCommandBuffer",)
