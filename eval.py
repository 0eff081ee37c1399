"""Evaluates policies: `python eval.py --config configs/shapes.py --workdir runs/shapes`.

`--config.eval.benchmarks=pope,mme` replaces the configuration's benchmarks. There are three stages,
all run by default: `--stages=generate`, `convert`, `score`; an interrupted `generate` resumes with
the unanswered questions. Any field of the configuration can be set by a flag;
`--config.data.folder=FOLDER` asks those of another folder.
"""

from stepprune_jax.extras import evaluate

if __name__ == "__main__":
    evaluate()
