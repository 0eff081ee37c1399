"""Runs one process of a run: `python one_process.py DEVICES MODEL DATA WORKDIR CHANGES`.

The environment says which process it is, in the variables of `stepprune_jax.parallel.distributed`.
"""

import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent


def main(devices, model, data, workdir, changes):
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "support"), str(HERE.parents[1])]
    import conftest

    options = ("--xla_force_host_platform_device_count=" + devices, *conftest.FLAGS[1:])
    os.environ["XLA_FLAGS"] = " ".join(options)
    from stepprune_jax.parallel import distributed

    distributed.start()
    from tiny_run import make_run

    from stepprune_jax.cli.command_line import show_messages
    from stepprune_jax.training import train

    show_messages("stdout")
    train(make_run(model, data, **json.loads(changes)), workdir)


if __name__ == "__main__":
    main(*sys.argv[1:])
