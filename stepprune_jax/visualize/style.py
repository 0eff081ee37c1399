"""The style of every figure: colours, type, and small files."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from stepprune_jax.evaluation.names import without_own_stop

DPI = 200  # a figure 7 inches wide is shown 700 points wide: two pixels a point
INK, SOFT, FAINT = "#1f2430", "#667085", "#e4e7ec"
# Okabe and Ito's colours, distinguishable with any kind of colour vision.
COLOURS = {
    "all tokens": INK,
    "StepPrune": "#0072b2",
    "StepPrune literal": "#56b4e9",
    "AutoSelect-like": "#d55e00",
    "[CLS] top-K": "#009e73",
    "grid": "#e69f00",
    "random": "#8c8c8c",
}
_FURTHER = ("#cc79a7", "#882255", "#999933", "#6a51a3", "#7f5539", "#44aa99")
_MARKERS = (".", "^", "s")
_STYLE = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a question is a dollar
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "errorbar.capsize": 2,
}


def colours(methods: Sequence[str]) -> dict[str, str]:
    """Assigns a colour to each method: its own if it has one, or another in alphabetical order.

    Args:
        methods: names of all rows of the table, so that all figures agree. The row of a method's
            own stop has the method's colour.
    """
    unknown = enumerate(_without_colour(methods))
    known = COLOURS | {name: _FURTHER[i % len(_FURTHER)] for i, name in unknown}
    return known | {name: known[without_own_stop(name)] for name in methods}


def markers(methods: Sequence[str]) -> dict[str, str]:
    """Assigns a marker to each method, a star to own stops; up to three of one colour differ."""
    further = enumerate(_without_colour(methods))
    known = dict.fromkeys(COLOURS, "o")
    known |= {name: _MARKERS[i // len(_FURTHER) % len(_MARKERS)] for i, name in further}
    return known | {name: "*" for name in methods if name != without_own_stop(name)}


def _without_colour(methods: Sequence[str]) -> list[str]:
    """Lists the methods that have no colour of their own, in alphabetical order."""
    return sorted({*map(without_own_stop, methods)} - set(COLOURS))


@contextlib.contextmanager
def canvas(width: float | int, height: float | int) -> Iterator[Figure]:
    """Creates an empty figure in this style, `width` by `height` inches.

    It changes neither matplotlib's global settings nor its list of open figures.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=DPI)
        FigureCanvasAgg(figure)
        yield figure


def save(figure: Figure, path: str | Path, most_bytes: int = 120_000) -> Path:
    """Writes a figure as a PNG with a palette.

    Args:
        figure: the figure, of unchanged size.
        path: the file, which is replaced. Its bytes depend only on the figure.
        most_bytes: the palette is halved, from 256 colours down to 64, until the file is no larger.

    Returns:
        The path.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # which the font lacks; it becomes a box
        figure.canvas.draw()
    flat = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    path, colours = Path(path), 256
    while True:
        few = reduce_colours(flat, choose_palette(flat, colours))
        few.save(path, format="PNG", optimize=True)
        if path.stat().st_size <= most_bytes or colours <= 64:
            return path
        colours //= 2


def choose_palette(image: Image.Image, colours: int) -> UInt8[np.ndarray, "p 3"]:
    """Chooses colours: half are the most common ones, the rest cover all others.

    An octree alone blends light tints into the white of the paper; the most common colours alone
    forget a thin line.

    Args:
        image: an RGB image.
        colours: number of colours, 4 to 256.

    Returns:
        At most that many distinct colours, in a fixed order.
    """
    counted = image.getcolors(image.width * image.height)
    common = [rgb for _, rgb in sorted(counted, reverse=True)[: colours // 2]]
    tree = image.quantize(colours - len(common), method=Image.Quantize.FASTOCTREE).getpalette()
    everything = [*common, *zip(tree[::3], tree[1::3], tree[2::3], strict=True)]
    return np.array(list(dict.fromkeys(everything))[:colours], np.uint8)


def reduce_colours(image: Image.Image, palette: UInt8[np.ndarray, "p 3"]) -> Image.Image:
    """Replaces every colour by the nearest of the palette; colours of the palette stay exact.

    Args:
        image: an RGB image.
        palette: result of `choose_palette`.

    Returns:
        The image in mode P.
    """
    pixels = np.asarray(image).astype(np.int32)
    packed = (pixels[..., 0] << 16) | (pixels[..., 1] << 8) | pixels[..., 2]
    distinct, index = np.unique(packed, return_inverse=True)
    rgb = np.stack([distinct >> 16, (distinct >> 8) & 255, distinct & 255], -1)
    wide = palette.astype(np.int32)
    # |a - b|^2 without the constant |a|^2, in one product instead of a table of differences.
    nearest = np.argmin((wide**2).sum(-1) - 2 * rgb @ wide.T, axis=-1).astype(np.uint8)
    flat = Image.fromarray(nearest[index.reshape(packed.shape)], mode="P")
    flat.putpalette(palette.tobytes())
    return flat


def spread(positions: Sequence[float | int], gap: float | int) -> list[float]:
    """Moves positions until neighbours are `gap` apart, by as little as possible.

    Args:
        positions: desired positions of labels.
        gap: smallest distance.

    Returns:
        Possible positions, in the given order.
    """
    order = sorted(range(len(positions)), key=lambda i: (positions[i], i))
    blocks: list[list[float]] = []  # mean of (position - offset), members
    for rank, i in enumerate(order):
        blocks.append([positions[i] - rank * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, size = blocks.pop()
            before = blocks[-1]
            before[0] = (before[0] * before[1] + mean * size) / (before[1] + size)
            before[1] += size
    placed = [mean for mean, size in blocks for _ in range(int(size))]
    result = [0.0] * len(positions)
    for rank, i in enumerate(order):
        result[i] = placed[rank] + rank * gap
    return result


def tidy(figure: Figure, **space: float) -> None:
    """Fits axes, labels and legends into the figure, with a margin around them."""
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08, **space)


def lines_across(axes: Axes, which: str = "y") -> None:
    """Draws faint lines at the ticks of one axis."""
    axes.grid(axis=which)
    axes.tick_params(axis=which, length=0)
