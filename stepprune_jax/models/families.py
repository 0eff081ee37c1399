"""The supported model families, and how a checkpoint folder is matched to one of them."""

from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Json
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.llava_next import LlavaNext
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL
from stepprune_jax.models.qwen3_vl import Qwen3_VL
from stepprune_jax.user_input import UserError

# Families by name. The order matters: `find_family` returns the first family that matches.
FAMILIES: dict[str, type[Backbone]] = {
    family.name: family for family in (LlavaNext, Llava, Qwen2_5_VL, Qwen3_VL)
}


def find_family(raw: Json, where: str) -> type[Backbone]:
    """Returns the family that reads a checkpoint folder.

    Args:
        raw: the folder's parsed ``config.json``.
        where: the folder, for the error message.

    Raises:
        ValueError: no family reads the folder; the message lists the supported models.
    """
    for family in FAMILIES.values():
        if family.matches(raw):
            return family
    supported = "; ".join(family.SUPPORTED for family in FAMILIES.values())
    raise UserError(
        f"{where}: unsupported architecture: model_type {raw.get('model_type')!r}, "
        f"architectures {raw.get('architectures')!r}; supported: {supported}; "
        "docs/architecture.md says how a family is added to stepprune_jax/models"
    )
