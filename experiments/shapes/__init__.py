"""A procedural world of visual questions, written as ordinary LLaVA data."""

from experiments.shapes.draw import patch_labels, render
from experiments.shapes.questions import FAMILIES
from experiments.shapes.scene import Scene, Shape
from experiments.shapes.world import scene_at, write_world

__all__ = [
    "FAMILIES",
    "Scene",
    "Shape",
    "patch_labels",
    "render",
    "scene_at",
    "write_world",
]
