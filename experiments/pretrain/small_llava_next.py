"""The small LLaVA-NeXT: a small LLaVA that learns to read tiles; see `small`.

Its tower and its projector see each tile as the small LLaVA saw an image; only the ends of rows are
new. So it always starts from a small LLaVA's weights, and nothing is learned from labels of
patches, which know one grid alone.
"""

import dataclasses

import jax.numpy as jnp

from experiments.pretrain import small_llava
from experiments.pretrain.settings import ShapeSettings
from experiments.pretrain.small_llava import TEMPLATE, image_settings
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.llava_next import LlavaNext, LlavaNextConfig
from stepprune_jax.models.stack import Params

__all__ = ["CONNECTOR", "FROM", "TEMPLATE", "TOWER", "adopt", "image_settings", "make_backbone"]

TOWER = ("vision",)
CONNECTOR = ("projector", "newline")
FROM = ("llava", "llava_next")


def _tiled(backbone: Backbone, shape: ShapeSettings) -> LlavaNext:
    """Returns a LLaVA on square images of tiles."""
    fields = {f.name: getattr(backbone.config, f.name) for f in dataclasses.fields(backbone.config)}
    side = backbone.config.vision.image_size * shape.tiles
    return LlavaNext(LlavaNextConfig(**fields | {"sizes": ((side, side),)}))


def make_backbone(shape: ShapeSettings, tokenizer) -> LlavaNext:
    """Returns a model of this shape and vocabulary."""
    return _tiled(small_llava.make_backbone(shape, tokenizer), shape)


def adopt(backbone: Backbone, params: Params, shape: ShapeSettings) -> tuple[LlavaNext, Params]:
    """Turns a LLaVA, or a LLaVA-NeXT, into one of this many tiles.

    A new end of rows is a vector of zeros at first, which says nothing.
    """
    newline = {"embedding": jnp.zeros(backbone.config.text.hidden_size)}
    return _tiled(backbone, shape), {"newline": newline, **params}
