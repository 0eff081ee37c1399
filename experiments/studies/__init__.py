"""Studies: training on several seeds, the README's picture, and example benchmarks."""
