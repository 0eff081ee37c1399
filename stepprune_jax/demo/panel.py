"""Contents of the page as HTML: the image with its kept patches, and the two answers."""

import base64
import io
from html import escape

import numpy as np
from matplotlib import colormaps
from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.demo.compare import Comparison
from stepprune_jax.inference.answer import Answer
from stepprune_jax.visualize.overlays import seen_patches
from stepprune_jax.visualize.patches import dim, kept_patches, patch_box, read_square

SIDE = 480  # pixels of the image
_RAMP = "plasma"

CSS = """
.kept svg { width: 100%; max-width: 480px; height: auto; display: block; border-radius: 6px; }
.kept rect { fill: transparent; stroke-width: 1.5; }
.kept g:hover rect { fill: rgb(255 255 255 / 45%); stroke: #fff; stroke-width: 3; }
.kept text { font: bold 12px system-ui, sans-serif; fill: #fff; stroke: #1f2430; stroke-width: 2.5;
  paint-order: stroke; text-anchor: middle; dominant-baseline: central; pointer-events: none; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 12px; }
.answers div { border: 1px solid #98a2b3; border-radius: 8px; padding: 10px 14px; }
.answers h3 { margin: 0 0 4px; font-size: 1rem; } .answers p { margin: 0; font-size: 1.4rem; }
.answers small { opacity: 0.8; }
"""


def draw_kept(model: VLM, shown: Comparison) -> str:
    """Draws the image as the model sees it, as HTML; hovering over a patch shows its step."""
    answer = shown.pruned
    order = answer.kept_indices[0]
    seen = seen_patches(model, shown.image, answer.grids[0], order)
    pixels = dim(read_square(seen.image, SIDE), kept_patches(seen.patches, seen.grid))
    patch = SIDE // seen.grid
    marks = []
    ramp = colormaps[_RAMP](np.linspace(0.1, 0.95, max(len(seen.patches), 2)), bytes=True)
    for step, (token, colour) in enumerate(zip(seen.patches, ramp, strict=False), 1):
        left, top, right, bottom = patch_box(token, seen.grid, SIDE)
        number = ""
        if patch >= 20 and len(seen.patches) <= 99:
            number = f'<text x="{(left + right) / 2:g}" y="{(top + bottom) / 2:g}">{step}</text>'
        marks.append(
            f'<g><rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" '
            f'stroke="rgb({colour[0]},{colour[1]},{colour[2]})">'
            f"<title>step {step} of {len(seen.patches)}</title></rect>{number}</g>"
        )
    return (
        f'<div class="kept"><svg viewBox="0 0 {SIDE} {SIDE}" role="img" '
        f'aria-label="{len(order)} tokens that were kept"><image width="{SIDE}" height="{SIDE}" '
        f'href="{_as_url(Image.fromarray(pixels))}"/>{"".join(marks)}</svg></div>'
    )


def draw_answers(shown: Comparison) -> str:
    """Puts the two answers side by side as HTML, with tokens and time to the first one."""
    full, pruned = shown.full, shown.pruned
    return (
        '<div class="answers">'
        + _answer("full", "all tokens", full)
        + _answer("pruned", "kept tokens", pruned)
        + "</div>"
    )


def _answer(name: str, title: str, answer: Answer) -> str:
    """Formats one of the answers."""
    return (
        f'<div id="answer-{name}"><h3>{title}: {answer.kept} of {answer.visual_tokens}</h3>'
        f"<p>{escape(answer.text) or '&nbsp;'}</p>"
        f"<small>first token after {answer.ttft_ms:.1f} ms</small></div>"
    )


def _as_url(image: Image.Image) -> str:
    """Encodes an image as a data URL."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
