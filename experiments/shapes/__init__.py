"""A procedural world of visual questions, written as ordinary LLaVA data."""

from experiments.shapes.draw import patch_labels, render
from experiments.shapes.levels import LEVELS, Level, ask
from experiments.shapes.questions import FAMILIES, Query
from experiments.shapes.scene import GRID, SIDE, Dot, Scene, Shape, Stroke, draw_scene
from experiments.shapes.world import scene_at, write_world

__all__ = [
    "FAMILIES",
    "GRID",
    "LEVELS",
    "SIDE",
    "Dot",
    "Level",
    "Query",
    "Scene",
    "Shape",
    "Stroke",
    "ask",
    "draw_scene",
    "patch_labels",
    "render",
    "scene_at",
    "write_world",
]
