"""The version of the installed package."""

from importlib import metadata


def version() -> str:
    """Returns the installed version, or "unknown" for a source tree that is not installed."""
    try:
        return metadata.version("stepprune-jax")
    except metadata.PackageNotFoundError:
        return "unknown"
