"""Analyzes the compiled programs of an answer, from XLA's dump in the section "rows"."""

import shutil
import sys
from pathlib import Path

import jax

from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.models import vlm
from stepprune_jax.models.weights import flatten, join_kernels
from tools.aot.hlo import backends, copied_weights, loops
from tools.card import figures

_MAX_BYTES = 4 << 20  # Larger files of the dump are not copied.


def main() -> None:
    """Counts library calls, Triton fusions, kernels in loops, and copies of weights."""
    parser = figures.parser(__doc__)
    parser.add_argument("--dump", type=Path, required=True, help="folder of the dump")
    flags = parser.parse_args()
    weights = vlm.abstract_params(find_backbone(flags.model))
    weights = flatten(weights) | flatten(jax.eval_shape(join_kernels, weights))
    kernels = {leaf.shape[-2:] for path, leaf in weights.items() if path.endswith("kernel")}
    files = sorted(flags.dump.glob("*after_optimizations.txt"))
    if not files:
        sys.exit("error: there is no dump: run the section rows first")
    for file in files:
        text = file.read_text(encoding="utf-8")
        counts = {"copied_weights": len(copied_weights(text, kernels)), "backends": backends(text)}
        counts["kernels_in_loops"] = " ".join(str(loop.kernels) for loop in loops(text)) or "none"
        figures.add(flags.out, ".".join(file.name.split(".")[:2]), **counts)
    for file in flags.dump.glob("*thunk_sequence*.txt"):  # Launches, graphs and host loops.
        if file.stat().st_size <= _MAX_BYTES:
            shutil.copy(file, flags.out.parent)


if __name__ == "__main__":
    main()
