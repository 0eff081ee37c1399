import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import as_torch, assert_close, clip_pair, normal

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.llava import tower as clip
from stepprune_jax.models.stack import Execution

encode = jax.jit(clip.encode, static_argnums=(1, 3), static_argnames=("layer", "taps", "execution"))


def reference(model, pixels):
    """Torch results with the keys of every layer."""
    keys = []
    hooks = [
        module.k_proj.register_forward_hook(lambda *args: keys.append(args[2]))
        for module in model.modules()
        if hasattr(module, "k_proj")
    ]
    result = model(as_torch(pixels), output_hidden_states=True, output_attentions=True)
    for hook in hooks:
        hook.remove()
    return result, keys


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_every_intermediate_equals_the_reference(activation):
    model, config, params = clip_pair(hidden_act=activation)
    pixels = normal(1, 3, 3, 28, 28)
    taps = [Tap("hidden", layer) for layer in range(5)]
    taps += [Tap(kind, layer) for kind in ("attention", "keys", "query") for layer in range(4)]
    _, ours = encode(params, config, pixels, -1, taps=tuple(taps))
    theirs, keys = reference(model, pixels)
    for layer in range(5):
        assert_close(ours[f"hidden.{layer}"], theirs.hidden_states[layer], what=f"hidden {layer}")
    for layer in range(4):
        assert_close(ours[f"attention.{layer}"], theirs.attentions[layer][:, :, 0])
        key = keys[layer].reshape(3, 17, 4, 8).transpose(1, 2)
        assert_close(ours[f"keys.{layer}"], key, what=f"keys {layer}")
        scores = jnp.einsum("ihc,ihtc->iht", ours[f"query.{layer}"], ours[f"keys.{layer}"])
        attention = jax.nn.softmax(scores * 8**-0.5, axis=-1)
        assert_close(attention, theirs.attentions[layer][:, :, 0], what=f"query {layer}")


def test_blocks_after_the_wanted_state_do_not_run():
    _, config, params = clip_pair()
    pixels = normal(3, 1, 3, 28, 28)
    last = np.arange(4) == 3
    broken = jax.tree.map(
        lambda leaf: np.where(last.reshape(-1, *[1] * (leaf.ndim - 1)), np.nan, leaf),
        params["layers"],
    )
    features, _ = encode({**params, "layers": broken}, config, pixels, -2)
    assert jnp.isfinite(features).all()


CLIP_L = {
    **{"num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 4096},
    **{"num_attention_heads": 16, "image_size": 336, "patch_size": 14},
}


@pytest.mark.parametrize(
    "fields",
    [{"image_size": 30}, pytest.param(CLIP_L, marks=pytest.mark.slow)],
    ids=["a border without a whole patch", "widths of CLIP-L"],
)
def test_the_last_state_equals_the_reference(fields):
    model, config, params = clip_pair(**fields)
    pixels = normal(4, 2, 3, fields["image_size"], fields["image_size"])
    ours, _ = encode(params, config, pixels, -1)
    assert_close(ours, reference(model, pixels)[0].hidden_states[-1])


@pytest.mark.parametrize("side", [7, 14, 21, 35])
def test_positions_of_images_of_another_size_are_interpolated(side):
    model, config, params = clip_pair()
    pixels = normal(6, 2, 3, side, side)
    smaller = dataclasses.replace(config, image_size=side, trained_size=config.image_size)
    ours, _ = encode(params, smaller, pixels, -1)
    theirs = model(as_torch(pixels), interpolate_pos_encoding=True, output_hidden_states=True)
    assert_close(ours, theirs.hidden_states[-1])


def test_fused_attention_equals_matrix_products():
    _, config, params = clip_pair()
    pixels = normal(5, 2, 3, 28, 28)
    plain, _ = encode(params, config, pixels)
    fused, _ = encode(params, config, pixels, execution=Execution(attention="xla"))
    assert_close(fused, plain)


def test_bfloat16_is_within_its_rounding_of_float32():
    _, config, params = clip_pair()
    pixels = normal(6, 2, 3, 28, 28)
    wide, _ = encode(params, config, pixels, -1)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    ours, _ = encode(narrow, config, pixels, -1)
    assert ours.dtype == jnp.bfloat16
    # 8 bits of mantissa; about 3 roundings a block add up over 4 blocks.
    assert_close(ours, wide, 12 * 2.0**-9)
