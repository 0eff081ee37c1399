"""The style of every figure."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stepprune_jax.evaluation.names import ALL, DEFAULT, without_own_stop

DPI = 200  # a figure 7 inches wide is shown 700 points wide: two pixels a point
INK, SOFT, FAINT = "#1f2430", "#667085", "#e4e7ec"
# Okabe and Ito's colours and more, distinguishable with any kind of colour vision.
_PALETTE = (
    *("#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#882255"),
    *("#999933", "#6a51a3", "#7f5539", "#44aa99", "#8c8c8c"),
)
_MARKERS = ("o", "^", "s")
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a question is a dollar
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
    """Assigns colour and marker to each method; a method's own stop is a star in its colour."""
    other_methods = [name for name in dict.fromkeys(map(without_own_stop, methods))]
    other_methods = [name for name in other_methods if name not in (ALL, DEFAULT)]
    look_of = {ALL: (INK, "o"), DEFAULT: ("#0072b2", "o")}
    for number, name in enumerate(other_methods):
        turn, place = divmod(number, len(_PALETTE))
        look_of[name] = _PALETTE[place], _MARKERS[turn % len(_MARKERS)]
    stars = {n: (look_of[without_own_stop(n)][0], "*") for n in methods if n not in look_of}
    return look_of | stars


@contextlib.contextmanager
def canvas(width: float | int, height: float | int) -> Iterator[Figure]:
    """Creates an empty figure in this style, in inches, without changing matplotlib's settings."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=DPI)
        FigureCanvasAgg(figure)
        yield figure


def save(figure: Figure, out: str | Path | io.BytesIO) -> None:
    """Writes a figure as a PNG; characters that the font lacks become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(out, format="png", pil_kwargs={"optimize": True})
