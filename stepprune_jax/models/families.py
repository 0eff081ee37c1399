"""The model families, and which of them reads a checkpoint folder."""

from stepprune_jax.models.config import Json
from stepprune_jax.models.family import Family
from stepprune_jax.models.llava import LLAVA
from stepprune_jax.models.qwen2_5_vl import QWEN2_5_VL

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAVA, QWEN2_5_VL)}


def find_family(raw: Json) -> Family | None:
    """Finds the family that reads a checkpoint folder.

    Args:
        raw: its parsed ``config.json``.

    Returns:
        The family, or None if no family does.
    """
    return next((family for family in FAMILIES.values() if family.matches(raw)), None)
