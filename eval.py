"""Evaluates policies: `python eval.py --config configs/shapes.py --workdir runs/shapes`.

`--config.eval.benchmarks=pope,mme` replaces the configuration's benchmarks. By default, all three
stages run: `--stages=generate,convert,score`. After an interruption, the stage `generate` continues
with the unanswered questions. Flags can set any field of the configuration, and
`--config.data.folder=FOLDER` selects another data folder.
"""

from stepprune_jax.extras import evaluate

if __name__ == "__main__":
    evaluate()
