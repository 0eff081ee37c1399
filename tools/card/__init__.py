"""All that a GPU is wanted for, in one command of a few minutes: `python -m tools.card`."""
