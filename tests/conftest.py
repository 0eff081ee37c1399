"""Settings for all tests, made before jax starts.

The suite spends most of its time compiling small programs, whose results do not depend on the
compiler's effort. Therefore machine code is generated without optimization and, with jaxlib 0.10,
without the newer fusion emitters, which take two thirds of the compilation time. Garbage collection
is rarer, because it took a seventh of the time with the modules of two frameworks loaded. jax gets
eight virtual CPU devices.
"""

import ctypes
import gc
import importlib.util
import os
import pathlib
from importlib.metadata import version

import hypothesis
import jaxtyping
import pytest
from shape_checks import check_annotations

# The decorator that the hook of `--jaxtyping-packages` applies; the package is not yet imported.
jaxtyping.jaxtyped = check_annotations

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if version("jaxlib").startswith("0.10."):  # 0.11 ends at flags that it does not know
    FLAGS += ("--xla_cpu_use_fusion_emitters=false",)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))
# Programs from earlier tests or from the user's cache would change the counts of compilations.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# Source lines in operations would take a tenth of the compilation time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

gc.set_threshold(50_000, 20, 50)

# Memory of a process, above which compiled programs are dropped between two modules. The largest
# module of tests adds 1 GB.
MAX_BYTES = 3 << 29

# Deadlines and the check for slow input generation would measure the load of the machine. The suite
# generates equal inputs in each run, so only a change of code can make a test fail; `make fuzz`
# searches for new inputs.
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


def pytest_addoption(parser):
    help_text = "write which model families can do what to tests/support/recorded/support.json"
    parser.addoption("--record_support", action="store_true", help=help_text)


def pytest_configure(config):
    if config.getoption("record_support"):
        from support_record import SupportRecorder

        config.pluginmanager.register(SupportRecorder())


@pytest.fixture(scope="session", autouse=True)
def names_of_jax():
    """Adds a name that only tests need to the oldest jax that policies support."""
    import jax
    from jax import experimental

    if not hasattr(jax, "enable_x64"):
        jax.enable_x64 = experimental.enable_x64


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Prints the library's log as most commands do. An earlier test may have changed this."""
    from stepprune_jax.cli.command_line import show_messages  # jaxtyping's hook comes first

    show_messages("stdout")


@pytest.fixture(scope="module", autouse=True)
def drop_programs():
    """Drops compiled programs if a process has 1.5 GB, or half of Linux's 65,530 memory maps.

    The programs of the complete suite take 5 GB, and modules share few of them. Each program takes
    some memory maps, with jax 0.11 more than with 0.10.
    """
    yield
    maps, pages = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/self/statm")
    if not maps.is_file():
        return
    resident = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > MAX_BYTES or maps.read_bytes().count(b"\n") > 30_000:
        import jax  # reads the flags above when imported

        jax.clear_caches()
        ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system


@pytest.fixture(scope="module")
def few_programs():
    """Pads all prompts of a module to one width, which reduces compilation."""
    from small_world import one_width

    with pytest.MonkeyPatch.context() as patch:
        one_width(patch)
        yield


def pytest_collection_modifyitems(items):
    """Runs the longest tests first, so that no worker has a long test left at the end.

    The module that drops all programs of its worker runs last.
    """
    long_packages = ("training", "policy", "pruning", "selectors")
    last_module = "test_few_programs.py"
    items.sort(
        key=lambda item: (
            item.path.name == last_module,
            item.path.parent.name not in long_packages,
        )
    )


@pytest.fixture(scope="session", autouse=True)
def keep_programs():
    """Keeps all programs during a test, because tests count compilations."""
    if importlib.util.find_spec("flax"):  # `make test-core` runs without the models
        from stepprune_jax.parallel import programs

        programs.MAX_PROGRAMS = 10_000


# Tiny models that all tests share. Tests must not write to their folders.


@pytest.fixture(scope="session")
def llava_folder(tmp_path_factory):
    from stepprune_jax import testing

    return testing.tiny_llava(tmp_path_factory.mktemp("tiny_llava"))


@pytest.fixture(scope="session")
def llava_model(llava_folder):
    return _load(llava_folder)


@pytest.fixture(scope="session")
def llava_pair(tmp_path_factory):
    """Returns a tiny LLaVA as our model and as the torch model of `transformers`."""
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
