"""The common style of all figures."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stepprune_jax.evaluation.names import ALL, DEFAULT, without_own_stop

DPI = 200  # A figure of 7 inches is displayed at 700 points, so each point has two pixels.
INK, SOFT, FAINT = "#1f2430", "#667085", "#e4e7ec"
# Colors of Okabe and Ito, and further colors. Color-blind readers can distinguish them.
_PALETTE = (
    *("#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#882255"),
    *("#999933", "#6a51a3", "#7f5539", "#44aa99", "#8c8c8c"),
)
_MARKERS = ("o", "^", "s")
_STYLE = {
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
    """Returns the color and the marker of each method.

    The learned stop of a method has the color of the method, and a star as its marker.
    """
    other_methods = [name for name in dict.fromkeys(map(without_own_stop, methods))]
    other_methods = [name for name in other_methods if name not in (ALL, DEFAULT)]
    looks_by_method = {ALL: (INK, "o"), DEFAULT: ("#0072b2", "o")}
    for index, name in enumerate(other_methods):
        marker_index, color_index = divmod(index, len(_PALETTE))
        looks_by_method[name] = _PALETTE[color_index], _MARKERS[marker_index % len(_MARKERS)]
    stars = {
        name: (looks_by_method[without_own_stop(name)][0], "*")
        for name in methods
        if name not in looks_by_method
    }
    return looks_by_method | stars


@contextlib.contextmanager
def canvas(width: float | int, height: float | int) -> Iterator[Figure]:
    """Creates an empty figure of a size in inches, without changing matplotlib's global style."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=DPI)
        FigureCanvasAgg(figure)
        yield figure


def save(figure: Figure, out: str | Path | io.BytesIO) -> None:
    """Writes a figure as a PNG. Characters that the font lacks become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(out, format="png", pil_kwargs={"optimize": True})
