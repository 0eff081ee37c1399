"""The sections of a measurement with their commands and time limits, most valuable first."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.testing import tiny_hf_config

ROOT = Path(__file__).parents[2]


class Section(NamedTuple):
    """A process of the measurement.

    Attributes:
        name: name of the section.
        seconds: time limit.
        command: arguments of Python.
        flags: flags for XLA.
        env: further environment variables.
        needs_gpu: whether the section is skipped on a machine without a GPU.
    """

    name: str
    seconds: int
    command: tuple[str, ...]
    flags: str = ""
    env: dict[str, str] | None = None
    needs_gpu: bool = False

    def environment(self, scratch: Path) -> dict[str, str]:
        """Returns the environment variables, with which sections share compiled programs."""
        autotune_flag = f"--xla_gpu_dump_autotune_results_to={autotuned(scratch)}"
        variables = {
            "XLA_FLAGS": " ".join((os.environ.get("XLA_FLAGS", ""), autotune_flag, self.flags)),
            "JAX_COMPILATION_CACHE_DIR": str(scratch / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return os.environ | variables | (self.env or {})


def autotuned(scratch: Path) -> Path:
    """Returns the file for the results of XLA's autotuning."""
    return scratch / "autotune.pbtxt"


def sections(out: Path, scratch: Path, small: bool) -> list[Section]:
    """Returns all sections.

    Args:
        out: folder for the results.
        scratch: folder for files that sections share.
        small: whether to measure small shapes, for any device.
    """
    model, tokens, rounds, budget = "llava-7b", 32, 5, 64
    sampled, gated, changes = "rloo.py:llava7b", "llava7b.py:short", ("--config.steps=10",)
    if small:
        model, tokens, rounds, budget = str(scratch / "config.json"), 2, 1, 4
        sampled, gated, changes = "rloo.py:shapes", "shapes.py", ("--config.steps=3",)
        changes += ("--config.batch_size=4", "--config.data.stats_images=4")
        vision_row = {"num_attention_heads": 2, "image_size": 32}
        Path(model).write_text(json.dumps(tiny_hf_config(vision=vision_row)), encoding="utf-8")
    changes += ("--config.log_every=1", "--config.optimizer.warmup=1")
    stepprune_row, vision_row, dump = f"stepprune@{budget}", f"visionzip@{budget}", scratch / "dump"

    def efficiency(name, seconds, rows, *more, flags="", batch=1):
        sizes = ("--batch", str(batch), "--new_tokens", str(tokens), "--rounds", str(rounds))
        arguments = ("--model", model, "--dtype", "bfloat16", "--json", str(out / f"{name}.json"))
        command = ("-m", "stepprune_jax.efficiency", *arguments, *sizes, *more, "--rows", *rows)
        return Section(name, seconds, command, flags)

    def card_section(name, seconds, module, *more, env=None):
        arguments = ("--model", model, "--out", str(out / f"{name}.jsonl"))
        return Section(name, seconds, ("-m", f"tools.card.{module}", *arguments, *more), env=env)

    tests = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytestmark = pytest.mark.gpu" in path.read_text(encoding="utf-8")
    )
    log_variables = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=3"}
    modules = "jit_(first_tokens|prefill|decode)"
    dump_flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={modules}"
    all_sections = [
        efficiency(
            "rows",
            180,
            ("all", stepprune_row, vision_row, f"{stepprune_row} group=4"),
            flags=dump_flags,
        ),
        card_section("programs", 30, "programs", "--dump", str(dump), env={"JAX_PLATFORMS": "cpu"}),
        card_section(
            "host", 75, "host", "--rows", vision_row, "all", stepprune_row, env=log_variables
        ),
        card_section("products", 75, "products"),
        efficiency("cudnn", 75, ("all", stepprune_row), "--attention", "cudnn"),
        Section("tests", 75, ("-m", "pytest", *tests, "-v", "-o", "addopts="), needs_gpu=True),
        card_section("sampled", 110, "updates", "--config", f"configs/{sampled}", *changes),
        card_section("gated", 90, "updates", "--config", f"configs/{gated}", *changes),
        efficiency("int8", 110, ("all", stepprune_row), "--weights", "int8"),
        efficiency("batch8", 120, ("all", stepprune_row, vision_row), batch=8),
    ]
    # Time limits are for GPUs. Small shapes may run on a laptop.
    return [
        section._replace(seconds=section.seconds * (10 if small else 1)) for section in all_sections
    ]
