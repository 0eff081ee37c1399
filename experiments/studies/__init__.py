"""Studies of the method: seeds, ablations, the paper's tables, and example benchmarks."""
