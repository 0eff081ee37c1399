"""Evaluates policies: `python eval.py --config configs/shapes.py --workdir runs/shapes`.

`--config.eval.benchmarks=pope,mme` names other benchmarks than the configuration does. There are
three stages, all by default: `--stages=generate`, `convert`, `score`; a `generate` that was stopped
resumes with the questions that have no answer. Any field of the configuration can be set by a flag;
`--config.data.test_seed=7` asks questions of a fresh test world of shapes.
"""

from stepprune_jax.evaluate import main

if __name__ == "__main__":
    main()
