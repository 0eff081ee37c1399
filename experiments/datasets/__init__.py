"""Public toy data sets as folders in LLaVA's format."""
