"""The benchmarks: their questions, answer files and scorers. Nothing here imports jax.

Each benchmark is a module, and so is a data folder of one's own. `BENCHMARKS` lists them all.
"""

from stepprune_jax.benchmarks import folder, gqa, mmbench, mme, pope, scienceqa, textvqa, vqav2
from stepprune_jax.benchmarks.benchmark import Benchmark, Score
from stepprune_jax.benchmarks.questions import BenchmarkQuestion

_ALL = (
    gqa.BENCHMARK,
    mmbench.BENCHMARK,
    mmbench.BENCHMARK_CN,
    mme.BENCHMARK,
    pope.BENCHMARK,
    scienceqa.BENCHMARK,
    vqav2.BENCHMARK,
    textvqa.BENCHMARK,
    folder.BENCHMARK,
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _ALL}

__all__ = ["BENCHMARKS", "Benchmark", "BenchmarkQuestion", "Score"]
