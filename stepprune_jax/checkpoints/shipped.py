"""What the package ships, by name: a small LLaVA and policies trained for it."""

from collections.abc import Iterable
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "assets"
# The small LLaVA of the shapes world.
SHAPES_MODEL = ASSETS / "shapes_llava"
MODELS = {"shapes": SHAPES_MODEL}
POLICIES = ASSETS / "policies"
_SUFFIX = ".safetensors"


def policy_names() -> list[str]:
    """Returns the names of the policies that are shipped."""
    return sorted(path.stem for path in POLICIES.glob(f"*{_SUFFIX}"))


def find_shipped_model(name: str | Path) -> Path | None:
    """Returns the folder of a shipped model, or None if there is none of that name."""
    return MODELS.get(str(name))


def find_shipped_policy(name: str | Path) -> Path | None:
    """Returns the file of a shipped policy, or None if there is none of that name."""
    return POLICIES / f"{name}{_SUFFIX}" if str(name) in policy_names() else None


def or_shipped(missing: str, given: str | Path, kind: str, names: Iterable[str]) -> str:
    """Says of something that is not there that no shipped thing has its name, either.

    Args:
        missing: what has been looked for, for the message.
        given: its name; a path or the id of a repository is left at that.
        kind: "model" or "policy".
        names: of those that are shipped.
    """
    if "/" in str(given) or ":" in str(given):
        return missing
    return f"{missing}, nor a shipped {kind} of that name ({', '.join(names)})"
