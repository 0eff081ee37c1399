"""The public benchmarks: numpy and the standard library only, so that scoring needs no jax.

One module a benchmark. `BENCHMARKS` names them all.
"""

from stepprune_jax.evaluation.benchmarks import mme, pope, scienceqa
from stepprune_jax.evaluation.benchmarks.result import Benchmark, Score

BENCHMARKS = {module.BENCHMARK.name: module.BENCHMARK for module in (mme, pope, scienceqa)}

__all__ = ["BENCHMARKS", "Benchmark", "Score"]
