"""The version of the installed package."""

from importlib import metadata


def version() -> str:
    """Returns the version that pip installed, or "unknown" for a source tree that it did not."""
    try:
        return metadata.version("stepprune-jax")
    except metadata.PackageNotFoundError:
        return "unknown"
