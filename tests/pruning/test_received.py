"""Pruners in a model without a class token, whose images differ in size and positions have axes."""

import numpy as np
import pytest
from quick import quick_or_slow
from visual import noise

from stepprune_jax.inference import RunOptions, generate, trace_arrays
from stepprune_jax.registry import PRUNERS, build_pruner, weighted

NEED_CLASS_TOKEN = ("cls", "prumerge", "prumerge_plus")
KEEP_IMAGES = [name for name, kind in PRUNERS.items() if kind.keeps_images]
NAMES = [x for x in PRUNERS if x not in {*NEED_CLASS_TOKEN, *KEEP_IMAGES, *weighted()}]
# One before the language model and one between its layers.
QUICK = ("dart", "visionzip")
OPTIONS = {name: {"layer": 1} for name in ("fastv", "topv", "dart")}
OPTIONS |= {
    name: {"average": False} for name in ("clse", "pyramiddrop", "sparsevlm", "sparsevlm_v2")
}


@pytest.mark.parametrize("name", quick_or_slow(NAMES, QUICK))
def test_images_of_different_sizes_keep_the_same_share(qwen_model, name):
    """Of 35 and 22 tokens; where a row stands changes nothing."""
    images, all_inputs = [noise(50, (50, 70)), noise(20, (20, 90))], []
    method = build_pruner(name, None if name == "all" else "1/3", options=OPTIONS.get(name))
    how = {"options": RunOptions(3), "trace": all_inputs.append}
    prompts = ["Is it red?", "Is it red?"]
    there = generate(qwen_model, prompts, images, method, **how)
    back = generate(qwen_model, prompts, images[::-1], method, **how)
    counts = [35, 22] if name == "all" else [12, 7]
    if name == "dart":  # in turns of eight pivots, four of which are added
        counts = [8 + 4, 0 + 4]
    assert [answer.visual_tokens for answer in there] == [35, 22]
    assert [answer.kept for answer in there] == counts
    arrays = [trace_arrays(all_inputs[0], row) for row in (0, 1)]
    for row in (0, 1) if name != "random" else ():  # which draws by the number of a row
        swapped = trace_arrays(all_inputs[1], 1 - row)
        for key, value in arrays[row].items():
            np.testing.assert_allclose(swapped[key], value, atol=1e-4)
        assert back[1 - row].token_ids == there[row].token_ids
    # Kept tokens have the position ids of the whole image, which is 5 rows and 7 columns.
    last = max(int(key.partition("_")[2]) for key in arrays[0] if key.startswith("kept"))
    kept, slot, position = (arrays[0][f"{what}_{last}"] for what in ("kept", "slot", "position"))
    own = kept >= 0
    start = position[0, slot[0]]
    np.testing.assert_array_equal(position[0, slot], start)
    np.testing.assert_array_equal((position[1, slot] - start)[own], kept[own] // 7)
    np.testing.assert_array_equal((position[2, slot] - start)[own], kept[own] % 7)
    assert position[:, -1].tolist() == [start + 7 + position.shape[1] - 1 - slot[-1] - 1] * 3
