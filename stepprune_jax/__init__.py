"""StepPrune in JAX."""
