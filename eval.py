"""Evaluates a trained policy: `python eval.py --config configs/shapes.py --workdir runs/shapes`.

Any field of the configuration can be set by a flag; `--config.data.test_seed=7` asks questions of
a fresh test world.
"""

import shlex
import sys

from absl import flags
from ml_collections import config_flags

from stepprune_jax import program
from stepprune_jax.evaluation.evaluate import evaluate

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder that train.py wrote; default: runs/CONFIG.")
_POLICY = flags.DEFINE_string("policy", None, "Policy file, in place of the workdir's own.")


def main() -> None:
    """Reads the flags and evaluates."""
    command = shlex.join(["python", *sys.argv])
    evaluate(_CONFIG.value, _WORKDIR.value, policy=_POLICY.value, command=command)


if __name__ == "__main__":
    program.run("eval.py", main)
