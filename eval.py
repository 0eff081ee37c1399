"""Evaluates a trained policy: `python eval.py --config configs/shapes.py --workdir runs/shapes`.

Any field of the configuration can be set by a flag; `--config.data.test_seed=7` asks questions of
a fresh test world.
"""

import shlex
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from stepprune_jax.evaluation.evaluate import evaluate

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder that train.py wrote.")


def main(argv: list[str]):
    """Reads the flags and evaluates."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    command = shlex.join(["python", *sys.argv])
    evaluate(_CONFIG.value, _WORKDIR.value, command=command)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)
