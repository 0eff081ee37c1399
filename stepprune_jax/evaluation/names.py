"""Names of table rows that several packages tell apart."""

ALL = "all tokens"
# The policy that the run in the working directory trained.
DEFAULT = "StepPrune"


def own_stop(method: str) -> str:
    """Names the row in which a method stops where it learned to."""
    return f"{method}, own stop"
