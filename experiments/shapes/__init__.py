"""A procedural world of visual questions, written as ordinary LLaVA data."""

from experiments.shapes.draw import patch_labels, render
from experiments.shapes.questions import FAMILIES
from experiments.shapes.world import scene_at, write_world

__all__ = ["FAMILIES", "patch_labels", "render", "scene_at", "write_world"]
