"""The model families, and which of them reads a checkpoint folder."""

from stepprune_jax.models.config import Json
from stepprune_jax.models.family import Family
from stepprune_jax.models.llava import LLAVA
from stepprune_jax.models.qwen2_5_vl import QWEN2_5_VL

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAVA, QWEN2_5_VL)}


def find_family(raw: Json, where: str) -> Family:
    """Finds the family that reads a checkpoint folder.

    Args:
        raw: its parsed ``config.json``.
        where: the folder, for the message.

    Raises:
        ValueError: no family does; the message lists the supported models.
    """
    for family in FAMILIES.values():
        if family.matches(raw):
            return family
    supported = "; ".join(family.SUPPORTED for family in FAMILIES.values())
    raise ValueError(
        f"{where}: unsupported architecture: model_type {raw.get('model_type')!r}, "
        f"architectures {raw.get('architectures')!r}; supported: {supported}"
    )
