"""Settings pyproject.toml cannot express: the folder of the configurations, the README's links."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def readme(repository: str | None) -> str:
    """Returns the README for a package index.

    Args:
        repository: address of the project, to which relative links are resolved, as an index does
            not serve its files. None leaves them unchanged.
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
        ],
        package_dir={"stepprune_jax.configs": "configs"},
        long_description=readme(PROJECT["urls"].get("Repository")),
        long_description_content_type="text/markdown",
    )
