"""Settings for every test, made before jax starts.

Eight virtual CPU devices, and machine code generated without optimisation and, where jaxlib still
can, without the newer fusion emitters, which take two thirds of the time of compiling: most of the
suite's time is compiling small programs, and their results do not depend on it. Python looks for
garbage less often: with the modules of two frameworks loaded, that alone took a seventh of the
time.
"""

import ctypes
import gc
import importlib.util
import os
import pathlib
from importlib.metadata import version

import hypothesis
import pytest

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if version("jaxlib").startswith("0.10."):  # 0.11 ends at flags that it does not know
    FLAGS += ("--xla_cpu_use_fusion_emitters=false",)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))
# What is compiled is what a test says, not what an earlier one, or the user, has left.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# Operations need not know the lines that made them, which costs a tenth of the time of compiling.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

gc.set_threshold(50_000, 20, 50)

MOST_BYTES = 3 << 29  # between two modules, the largest of which adds 1 GB

# A deadline measures how busy the machine is, and so does the check on the time of drawing inputs.
# The suite draws the same inputs each time, for a change fails by its own fault; `make fuzz` looks
# for new ones.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "fuzz",
    hypothesis.settings.get_profile("suite"),
    max_examples=10_000,
    derandomize=False,
    print_blob=True,
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def names_of_jax():
    """Gives the oldest jax that policies run on a name that only tests need."""
    import jax
    from jax import experimental

    if not hasattr(jax, "enable_x64"):
        jax.enable_x64 = experimental.enable_x64


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Shows what the library logs, as most commands do; the test before may have run another."""
    from stepprune_jax.cli.command_line import show_messages  # jaxtyping's hook comes first

    show_messages("stdout")


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """Drops compiled programs when a process has 1.5 GB, or half of Linux's 65,530 memory maps.

    Programs of a whole suite take 5 GB, while few are used by several modules. Each takes some
    maps, with jax 0.11 more than with 0.10.
    """
    yield
    maps, pages = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/self/statm")
    if not maps.is_file():
        return
    resident = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > MOST_BYTES or maps.read_bytes().count(b"\n") > 30_000:
        import jax  # after the flags above

        jax.clear_caches()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise the process keeps what is free


@pytest.fixture(scope="module")
def few_programs():
    """One width for all prompts of a module."""
    from small_world import one_width

    with pytest.MonkeyPatch.context() as patch:
        one_width(patch)
        yield


def pytest_collection_modifyitems(items):
    """Puts what takes longest first: else one worker has it left at the end.

    What drops all programs of its worker comes last.
    """
    longest = ("training", "policy", "pruning", "trained")
    last = "test_few_programs.py"
    items.sort(key=lambda item: (item.path.name == last, item.path.parent.name not in longest))


@pytest.fixture(scope="session", autouse=True)
def keep_programs():
    """Keeps all programs during a test, because tests count compilations."""
    if importlib.util.find_spec("flax"):  # `make test-core` runs without the models
        from stepprune_jax.parallel import programs

        programs.MAX_PROGRAMS = 10_000


# One tiny model of each family; tests write to none of these folders.


@pytest.fixture(scope="session")
def llava_folder(tmp_path_factory):
    from stepprune_jax import testing

    return testing.tiny_llava(tmp_path_factory.mktemp("tiny_llava"))


@pytest.fixture(scope="session")
def llava_model(llava_folder):
    return _load(llava_folder)


@pytest.fixture(scope="session")
def llava_pair(tmp_path_factory):
    """A tiny LLaVA as ours and as the torch model of `transformers`."""
    from generation_reference import pair  # jaxtyping's hook comes first

    return pair(tmp_path_factory.mktemp("llava_pair"))


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory):
    from tiny_qwen import tiny_qwen  # jaxtyping's hook comes first

    return tiny_qwen(tmp_path_factory.mktemp("tiny_qwen"))


@pytest.fixture(scope="session")
def qwen_model(qwen_folder):
    return _load(qwen_folder)


def _load(folder):
    import jax.numpy as jnp

    from stepprune_jax.checkpoints.load import load_vlm

    return load_vlm(folder, dtype=jnp.float32, progress=False)
