"""What pyproject.toml cannot say: where the configurations lie, and the README's links."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def readme(repository: str | None) -> str:
    """The README for a package index.

    Args:
        repository: where the project lives; relative links lead there, as an index has no files
            that they could lead to. None leaves them as they are.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if repository is None:
        return text
    relative = r"(?!https?:|#)"
    text = re.sub(rf"(!\[[^]]*\]\(){relative}", rf"\g<1>{repository}/raw/HEAD/", text)
    return re.sub(rf"((?<!!)\[[^]]*\]\(){relative}", rf"\g<1>{repository}/blob/HEAD/", text)


if __name__ == "__main__":
    setup(
        packages=[
            *find_packages(include=["stepprune_jax", "stepprune_jax.*"]),
            "stepprune_jax.configs",
            "stepprune_jax.configs.ablations",
        ],
        package_dir={"stepprune_jax.configs": "configs"},
        long_description=readme(PROJECT["urls"].get("Repository")),
        long_description_content_type="text/markdown",
    )
