"""The benchmarks: numpy and the standard library only, so that scoring needs no jax.

One module a benchmark, the shapes world among them. `BENCHMARKS` names them all.
"""

from stepprune_jax.benchmarks import gqa, mmbench, mme, pope, scienceqa, shapes, textvqa, vqav2
from stepprune_jax.benchmarks.result import Benchmark, Score

_ALL = (
    gqa.BENCHMARK,
    mmbench.BENCHMARK,
    mmbench.BENCHMARK_CN,
    mme.BENCHMARK,
    pope.BENCHMARK,
    scienceqa.BENCHMARK,
    vqav2.BENCHMARK,
    textvqa.BENCHMARK,
    shapes.BENCHMARK,
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _ALL}

__all__ = ["BENCHMARKS", "Benchmark", "Score"]
