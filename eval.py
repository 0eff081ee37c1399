"""Evaluates policies: `python eval.py --config configs/shapes.py --workdir runs/shapes`.

`--config.eval.benchmarks=pope,mme` names other benchmarks than the configuration does. There are
three stages, all by default: `--stages=generate`, `convert`, `score`; a `generate` that was stopped
resumes with the questions that have no answer. Any field of the configuration can be set by a flag;
`--config.data.test_seed=7` asks questions of a fresh test world of shapes.
"""

import shlex
import sys

from absl import flags
from ml_collections import config_flags

from stepprune_jax import command_line
from stepprune_jax.evaluate import STAGES, evaluate
from stepprune_jax.evaluation.settings import read_evaluation
from stepprune_jax.parallel import distributed
from stepprune_jax.user_input import user_input

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder that train.py wrote; default: runs/CONFIG.")
_POLICY = flags.DEFINE_string("policy", None, "Policy file, in place of the workdir's own.")
_STAGES = flags.DEFINE_list("stages", list(STAGES), f"Some of {','.join(STAGES)}.")


def main() -> None:
    """Reads the flags and evaluates."""
    with user_input():
        run = read_evaluation(_CONFIG.value)
        distributed.use_cores(_CONFIG.value.get("cpu_devices", 0))
        distributed.start()
    evaluate(
        run,
        _WORKDIR.value,
        stages=_STAGES.value,
        policy=_POLICY.value,
        command=shlex.join(["python", *sys.argv]),
    )


if __name__ == "__main__":
    command_line.run("eval.py", main)
