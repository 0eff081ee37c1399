"""The levels of the world: what is drawn, and how often each family of questions is asked."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from experiments.shapes import crowds
from experiments.shapes.questions import FAMILIES, Query
from experiments.shapes.scene import CROWD_GRID, GRID, SIDE, Scene


class Level(NamedTuple):
    """A level of the world.

    Attributes:
        side: height and width of its images in pixels, unless given.
        grid: patches along an edge, unless given.
        crowd: whether its scenes are crowds.
        families: functions that ask a question of a family, (scene, random, grid) -> question or
            None.
        weights: frequency of each family.
        slow: the families that a small model learns last.
    """

    side: int
    grid: int
    crowd: bool
    families: Mapping[str, Callable[[Scene, np.random.Generator, int], Query | None]]
    weights: tuple[float, ...]
    slow: tuple[str, ...]


LEVELS = {
    # Families that need many tokens are drawn more often; those learned last are about geometry
    # and number.
    1: Level(
        side=SIDE,
        grid=GRID,
        crowd=False,
        families=FAMILIES,
        weights=(1.0, 1.0, 1.2, 1.6, 1.2, 1.2, 0.8, 1.2, 4.5, 0.8),
        slow=("counting", "relation", "position", "size"),
    ),
    2: Level(
        side=10 * CROWD_GRID,
        grid=CROWD_GRID,
        crowd=True,
        families={n: FAMILIES[n] for n in ("color", "shape", "existence")} | crowds.FAMILIES,
        weights=(1.0, 1.0, 0.8, 2.0, 3.0, 4.0, 4.0, 4.0),
        slow=("one step", "two steps", "three steps"),
    ),
}


def ask(
    scene: Scene,
    random: np.random.Generator,
    count: int = 8,
    grid: int = GRID,
    emphasis: float = 1.0,
    level: int = 1,
) -> list[Query]:
    """Draws different questions about a scene."""
    families, slow = LEVELS[level].families, LEVELS[level].slow
    makers, queries = list(families.values()), {}
    factors = [emphasis if name in slow else 1.0 for name in families]
    weights = np.asarray(LEVELS[level].weights) * factors
    for _ in range(12 * count):
        maker = makers[int(random.choice(len(makers), p=weights / weights.sum()))]
        query = maker(scene, random, grid)
        if query is not None:
            queries.setdefault(query.text, query)
        if len(queries) == count:
            break
    return list(queries.values())
