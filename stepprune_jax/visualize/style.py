"""The common style of all figures."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stepprune_jax.evaluation.names import ALL, DEFAULT, without_learned_stop

DPI = 200  # A figure of 7 inches is displayed at 700 points, so each point has two pixels.
INK, SOFT, FAINT = "#1f2430", "#667085", "#e4e7ec"
# Colors of Okabe and Ito, and further colors. Color-blind readers can distinguish them.
_PALETTE = (
    *("#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#882255"),
    *("#999933", "#6a51a3", "#7f5539", "#44aa99", "#8c8c8c"),
)
_MARKERS = ("o", "^", "s")
_STYLE: dict[Any, object] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "text.parse_math": False,  # A question may contain dollar signs.
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def looks(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns the color and the marker of each method, for plots.

    A method and its learned stop have the same color. The marker of a learned stop is a star.

    Args:
        methods: names of table rows.

    Returns:
        Pairs (color, marker) by name, for `methods` and for further names.
    """
    base_names = dict.fromkeys(map(without_learned_stop, methods))
    looks_by_name = {ALL: (INK, "o"), DEFAULT: ("#0072b2", "o")}
    other_names = [name for name in base_names if name not in looks_by_name]
    for index, name in enumerate(other_names):
        marker_index, color_index = divmod(index, len(_PALETTE))
        looks_by_name[name] = _PALETTE[color_index], _MARKERS[marker_index % len(_MARKERS)]
    stop_looks = {
        name: (looks_by_name[without_learned_stop(name)][0], "*")
        for name in methods
        if name not in looks_by_name
    }
    return looks_by_name | stop_looks


@contextlib.contextmanager
def canvas(width: float | int, height: float | int) -> Iterator[Figure]:
    """Creates an empty figure in the common style, without changing matplotlib's global style.

    Args:
        width: width in inches.
        height: height in inches.

    Yields:
        The figure. It must be drawn and saved inside the context.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=DPI)
        FigureCanvasAgg(figure)
        yield figure


def save(figure: Figure, out: str | Path | io.BytesIO) -> None:
    """Writes a figure as a PNG image. Characters that the font does not contain become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # matplotlib warns of such characters
        figure.savefig(out, format="png", pil_kwargs={"optimize": True})
