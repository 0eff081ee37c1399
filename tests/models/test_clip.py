import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hf_reference import as_torch, assert_close, make_llava, normal

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.llava import tower as clip
from stepprune_jax.models.stack import Execution

encode = jax.jit(clip.encode, static_argnums=(1, 3), static_argnames=("layer", "taps", "execution"))


@pytest.fixture(scope="module")
def tower(llava):
    """Returns the torch model, our configuration and our weights."""
    return tower_of(llava)


def tower_of(llava):
    return llava.torch.model.vision_tower, llava.config.vision, llava.params["vision"]


def test_every_intermediate_equals_the_reference(tower):
    model, config, params = tower
    pixels = normal(1, 3, 3, 28, 28)
    taps = [Tap("hidden", layer) for layer in range(5)]
    taps += [Tap(kind, layer) for kind in ("attention", "keys", "query") for layer in range(4)]
    _, ours = encode(params, config, pixels, -1, taps=tuple(taps))
    keys = []
    for module in model.modules():
        if hasattr(module, "k_proj"):
            module.k_proj.register_forward_hook(lambda *args: keys.append(args[2]))
    theirs = model(as_torch(pixels), output_hidden_states=True, output_attentions=True)
    for layer in range(5):
        assert_close(ours[f"hidden.{layer}"], theirs.hidden_states[layer], what=f"hidden {layer}")
    for layer in range(4):
        assert_close(ours[f"attention.{layer}"], theirs.attentions[layer][:, :, 0])
        key = keys[layer].reshape(3, 17, 4, 8).transpose(1, 2)
        assert_close(ours[f"keys.{layer}"], key, what=f"keys {layer}")
        scores = jnp.einsum("ihc,ihtc->iht", ours[f"query.{layer}"], ours[f"keys.{layer}"])
        attention = jax.nn.softmax(scores * 8**-0.5, axis=-1)
        assert_close(attention, theirs.attentions[layer][:, :, 0], what=f"query {layer}")


def test_blocks_after_the_requested_state_do_not_run(tower):
    _, config, params = tower
    broken = jax.tree.map(lambda leaf: leaf.at[3].set(jnp.nan), params["layers"])
    features, _ = encode({**params, "layers": broken}, config, normal(3, 1, 3, 28, 28), -2)
    assert jnp.isfinite(features).all()


def test_exact_gelu_and_an_incomplete_border_patch_equal_the_reference(tmp_path):
    fields = {"hidden_act": "gelu", "image_size": 30, "num_hidden_layers": 1}
    model, config, params = tower_of(make_llava(tmp_path, vision=fields))
    pixels = normal(4, 2, 3, 30, 30)
    ours, _ = encode(params, config, pixels, -1)
    assert_close(ours, model(as_torch(pixels), output_hidden_states=True).hidden_states[-1])


@pytest.mark.parametrize("side", [7, 21])
def test_position_embeddings_are_interpolated_for_other_image_sizes(tower, side):
    model, config, params = tower
    pixels = normal(6, 2, 3, side, side)
    smaller = dataclasses.replace(config, image_size=side, trained_size=config.image_size)
    ours, _ = encode(params, smaller, pixels, -1)
    theirs = model(as_torch(pixels), interpolate_pos_encoding=True, output_hidden_states=True)
    assert_close(ours, theirs.hidden_states[-1])


def test_fused_attention_and_bfloat16_differ_only_by_rounding(tower):
    _, config, params = tower
    pixels = normal(5, 2, 3, 28, 28)
    expected, _ = encode(params, config, pixels, -1)
    fused, _ = encode(params, config, pixels, -1, execution=Execution(attention="xla"))
    assert_close(fused, expected)
    rounded, _ = encode(
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), config, pixels, -1
    )
    assert rounded.dtype == jnp.bfloat16
    # bfloat16 has 8 bits of mantissa; about 3 roundings per block add up over 4 blocks.
    assert_close(rounded, expected, 12 * 2.0**-9)
