"""A procedural world of visual questions, written as ordinary LLaVA data."""

from stepprune_jax.data.shapes.draw import patch_labels, render
from stepprune_jax.data.shapes.levels import LEVELS, Level, ask
from stepprune_jax.data.shapes.questions import FAMILIES, Query
from stepprune_jax.data.shapes.scene import GRID, SIDE, Dot, Scene, Shape, Stroke, draw_scene
from stepprune_jax.data.shapes.world import scene_at, write_world

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
