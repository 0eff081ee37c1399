"""Runs an evaluation in a separate process: `python one_process.py MODEL ROOT WORKDIR SETTINGS`.

With several processes, environment variables give the number of this one, as
`parallel.distributed` reads them.
"""

import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent


def main(model, root, workdir, settings):
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "support"), str(HERE.parents[1])]
    import conftest

    os.environ["XLA_FLAGS"] = " ".join(conftest.FLAGS[1:])
    from stepprune_jax.parallel import distributed

    distributed.start()
    from small_world import small_run

    from stepprune_jax.evaluation import generate_stage
    from stepprune_jax.inference import encode

    # Small chunks, so that answers come often.
    encode.CHUNK, encode.WIDTHS, generate_stage.WIDTHS = 2, (192,), (192,)
    fields = json.loads(settings)
    fields["budgets"] = tuple(fields["budgets"])
    config = small_run(pathlib.Path(model), pathlib.Path(root), **fields)
    generate_stage.generate_answers(config, workdir)


if __name__ == "__main__":
    main(*sys.argv[1:])
