"""The sections, the most valuable first: what each runs, and for how long at most."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.testing import tiny_hf_config

ROOT = Path(__file__).parents[2]


class Section(NamedTuple):
    """A process: its name, its limit in seconds, what follows "python", and its variables.

    `flags` are those of XLA; a section that `needs_gpu` is left out elsewhere.
    """

    name: str
    seconds: int
    command: tuple[str, ...]
    flags: str = ""
    env: dict[str, str] | None = None
    needs_gpu: bool = False

    def environment(self, scratch: Path) -> dict[str, str]:
        """Returns its variables; a section finds what earlier ones have compiled."""
        found = f"--xla_gpu_dump_autotune_results_to={autotuned(scratch)}"
        kept = {
            "XLA_FLAGS": " ".join((os.environ.get("XLA_FLAGS", ""), found, self.flags)),
            "JAX_COMPILATION_CACHE_DIR": str(scratch / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return os.environ | kept | (self.env or {})


def autotuned(scratch: Path) -> Path:
    """Returns the file for what XLA finds to be the fastest."""
    return scratch / "autotune.pbtxt"


def sections(out: Path, scratch: Path, small: bool) -> list[Section]:
    """Returns all sections."""
    model, tokens, rounds, count = "llava-7b", 32, 5, 64
    sampled, gated, changes = "rloo.py:llava7b", "llava7b.py:short", ("--config.steps=10",)
    if small:
        model, tokens, rounds, count = str(scratch / "config.json"), 2, 1, 4
        sampled, gated, changes = "rloo.py:shapes", "shapes.py", ("--config.steps=3",)
        changes += ("--config.batch_size=4", "--config.data.stats_images=4")
        vision = {"num_attention_heads": 2, "image_size": 32}
        Path(model).write_text(json.dumps(tiny_hf_config(vision=vision)), encoding="utf-8")
    changes += ("--config.log_every=1", "--config.optimizer.warmup=1")
    step, vision, dump = f"stepprune@{count}", f"visionzip@{count}", scratch / "dump"

    def efficiency(name, seconds, rows, *also, flags="", batch=1):
        sizes = ("--batch", str(batch), "--new_tokens", str(tokens), "--rounds", str(rounds))
        given = ("--model", model, "--dtype", "bfloat16", "--json", str(out / f"{name}.json"))
        command = ("-m", "stepprune_jax.efficiency", *given, *sizes, *also, "--rows", *rows)
        return Section(name, seconds, command, flags)

    def own(name, seconds, module, *also, env=None):
        given = ("--model", model, "--out", str(out / f"{name}.jsonl"))
        return Section(name, seconds, ("-m", f"tools.card.{module}", *given, *also), env=env)

    tests = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytestmark = pytest.mark.gpu" in path.read_text(encoding="utf-8")
    )
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=3"}
    text = (
        f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_(begin|decode)"
    )
    made = [
        efficiency("rows", 180, ("all", step, vision, f"{step} group=4"), flags=text),
        own("programs", 30, "programs", "--dump", str(dump), env={"JAX_PLATFORMS": "cpu"}),
        own("host", 75, "host", "--rows", vision, "all", step, env=log),
        own("products", 75, "products"),
        efficiency("cudnn", 75, ("all", step), "--attention", "cudnn"),
        Section("tests", 75, ("-m", "pytest", *tests, "-v", "-o", "addopts="), needs_gpu=True),
        own("sampled", 110, "updates", "--config", f"configs/{sampled}", *changes),
        own("gated", 90, "updates", "--config", f"configs/{gated}", *changes),
        efficiency("int8", 110, ("all", step), "--weights", "int8"),
        efficiency("batch8", 120, ("all", step, vision), batch=8),
    ]
    # A limit is for a card: small shapes are for a laptop.
    return [section._replace(seconds=section.seconds * (10 if small else 1)) for section in made]
