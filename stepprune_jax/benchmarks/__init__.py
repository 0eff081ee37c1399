"""Questions, answer files and scorers of benchmarks. Nothing here imports jax.

Each benchmark is a module; `folder` is the benchmark of a user's data folder. `BENCHMARKS` contains
all of them by name.
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
