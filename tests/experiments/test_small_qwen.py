"""Pretraining of a small Qwen2.5-VL, on images with different numbers of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tiny_pretraining import FIELDS
from visual import kept_at, random_bytes

from experiments.pretrain import small_qwen
from experiments.pretrain.conversations import Sample
from experiments.pretrain.data import batch_indices
from experiments.pretrain.images import Images, fit_labels, token_mask
from experiments.pretrain.language import (
    Display,
    Exchanges,
    VisibleTokens,
    Words,
    language_loss,
    mix_noise,
    run_packed,
    sample_tokens,
)
from experiments.pretrain.packing import pack
from experiments.pretrain.run import pretrain
from experiments.pretrain.structure import AROUND
from experiments.pretrain.tower import init_heads, tower_loss
from experiments.pretrain.vocabulary import build_tokenizer
from experiments.shapes import write_world
from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.inference import RunOptions, generate
from stepprune_jax.models import vlm
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.attention import attention_weights
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL, tower
from stepprune_jax.models.qwen2_5_vl.images import Patches

# Slow: shipped models are already trained, so these tests run only when pretraining changes.
pytestmark = pytest.mark.slow

TURNS = (("Red?", "yes", "What color is it?", "blue"), ("How many?", "two"))
GRIDS = np.array([[2, 2], [3, 3]])


def make_run(**changes):
    sizes = {"vision_layers": 2, "text_layers": 2, "text_kv_heads": 1, "rope_sections": (1, 1, 2)}
    sizes |= {"least_size": 16, "window_size": 16, "full_blocks": (1,)}
    fields = FIELDS | {f"model.{name}": size for name, size in sizes.items()}
    return tiny_run.load_config("pretrain_shapes_qwen").replace(fields | changes)


@pytest.fixture(scope="module")
def model():
    tokenizer = build_tokenizer((text for turns in TURNS for text in turns), small_qwen.TEMPLATE)
    backbone = small_qwen.make_backbone(make_run().model, tokenizer)
    return small_qwen.init_params(jax.random.key(0), backbone), backbone, tokenizer


@pytest.fixture(scope="module")
def images(model):
    """An image of 2 x 2 tokens and an image of 3 x 3 tokens, padded to 16 tokens."""
    return Images(Patches(random_bytes(1, 2, 64, 48), GRIDS), GRIDS)


def test_initial_heads_of_window_blocks_attend_to_one_neighbor():
    run = make_run(**{"model.vision_heads": 4, "model.vision_width": 64, "model.window_size": 64})
    backbone = small_qwen.make_backbone(run.model, build_tokenizer([], small_qwen.TEMPLATE))
    params, config = small_qwen.init_params(jax.random.key(3), backbone), backbone.config
    side = 6
    layout = tower.lay_out_windows(jnp.array([[side, side]]), config.vision.window, side**2)
    context = tower._make_context(config.vision, layout)
    weights = jax.tree.map(lambda leaf: leaf[0], params["vision"]["layers"]["attention"])
    x = jax.random.normal(jax.random.key(4), (1, 4 * side**2, 64))
    block = tower.QwenVisionAttention(config.vision)
    outputs = jax.jit(block.apply, static_argnums=3)({"params": weights}, x, context, False)
    keys = [tower.Segment(outputs.key, outputs.value, None)]
    attended = np.asarray(attention_weights(outputs.query, keys)[0]).argmax(-1)
    # Row and column of each patch in the tower's order: merged patches are adjacent.
    row, column = np.divmod(np.arange(side**2), side)
    offsets = np.divmod(np.arange(4), 2)
    patches = np.stack([2 * row[:, None] + offsets[0], 2 * column[:, None] + offsets[1]]).reshape(
        2, -1
    )
    is_interior = ((patches > 0) & (patches < 2 * side - 1)).all(0)
    for head, step in enumerate(AROUND[:4]):
        assert (patches[:, attended[head]] - patches == np.array(step)[:, None]).all(0)[
            is_interior
        ].mean() > 0.9


def test_packed_logits_equal_the_logits_of_separate_prompts(model, images):
    params, backbone, tokenizer = model
    encoder = ConversationEncoder(tokenizer, Qwen2_5_VL.place_images, Qwen2_5_VL.conversation)
    packed = pack(encoder, [Sample(None, turns, n) for n, turns in enumerate(TURNS)])
    features, _ = jax.jit(backbone.encode_image)(params, images.pixels)
    # The smaller image shows two tokens and padding, and the larger image shows three tokens.
    index = jnp.array([[0, 3, 5], [1, 5, 8]])
    real = index < GRIDS.prod(1)[:, None]
    tokens = jnp.take_along_axis(features, index[..., None], axis=1)
    visible = VisibleTokens(tokens, index, real, real, GRIDS)
    no_slots = jnp.zeros((2, 0), jnp.int32)
    packed_logits, middle = jax.jit(run_packed, static_argnums=1)(
        params, backbone, visible, packed, no_slots
    )
    assert middle.visual.shape == (2, 3, 16)

    @jax.jit
    def separate_logits(ids, length, tokens, index, real, grid):
        tokens, real, index, grid = (part[None, None] for part in (tokens, real, index, grid))
        visual = kept_at(tokens, real, index), grid
        sequence = assemble(params, backbone, ids[None], length[None], *visual)
        return vlm.prefill(params, backbone.config, sequence, 1, all_logits=True).logits[0]

    for row, turns in enumerate(TURNS):
        target = 0
        for number in range(0, len(turns), 2):
            encoded = encoder.encode(turns[number : number + 2], 1)
            ids = np.zeros(24, np.int32)
            ids[: len(encoded.ids)] = encoded.ids
            num_visual = int(real[row].sum())
            logits = separate_logits(
                ids, np.int32(len(encoded.ids)), *(field[row] for field in visible[:3]), GRIDS[row]
            )
            for position, label in enumerate(encoded.labels):
                if label >= 0:
                    np.testing.assert_allclose(
                        packed_logits[row, target], logits[position + num_visual - 2], atol=1e-4
                    )
                    assert packed.label[row, target] == label
                    target += 1
        assert (packed.label[row, target:] == -1).all()


def test_padding_does_not_change_losses(model, images):
    """Compares an image of 2 x 2 tokens with the same image padded to 16 tokens."""
    params, backbone, tokenizer = model
    encoder = ConversationEncoder(tokenizer, Qwen2_5_VL.place_images, Qwen2_5_VL.conversation)
    packed = jax.tree.map(jnp.asarray, pack(encoder, [Sample(None, TURNS[0], 0)]))
    padded = jax.tree.map(lambda x: x[:1], images)
    unpadded = padded._replace(pixels=padded.pixels._replace(values=padded.pixels.values[:, :16]))
    assert np.asarray(token_mask(backbone, padded, 16)).sum() == 4
    tokens = jnp.asarray(tokenizer.convert_tokens_to_ids(["red", "blue"]))
    kind, probability = np.array([[0, 1, 1, 0]]), np.array([[0.2, np.nan, 0.9, 0.5]], np.float32)
    padding_labels = np.array([[1] * 5])  # Follows the labels of a smaller image.
    loss = jax.jit(language_loss, static_argnums=(2, 5))
    losses = []
    for batch_images, labels in (
        (unpadded, kind),
        (padded, np.concatenate([kind, padding_labels], axis=1)),
    ):
        words = [Words(jnp.asarray(labels), tokens), Words(jnp.asarray(probability), tokens)]
        batch = Exchanges(batch_images, packed, None, words)
        losses.append(loss(params, {}, backbone, jax.random.key(0), batch, Display())[0])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    labels = {"class_a": kind, "value_b": np.ones((1, 4, 2))}
    heads = jax.tree.map(lambda x: x + 0.1, init_heads(labels, 16))
    trained, loss_function = params | {"heads": heads}, jax.jit(tower_loss, static_argnums=1)
    padded_labels = {name: fit_labels(jnp.asarray(label), 9) for name, label in labels.items()}
    first, second = (
        loss_function(trained, backbone, *x)[0]
        for x in ((unpadded, labels), (padded, padded_labels))
    )
    np.testing.assert_allclose(first, second, rtol=1e-5)


def test_padding_is_neither_sampled_nor_spared_from_noise():
    real = jnp.arange(12) < jnp.array([[5], [12]])
    for sharpness in (0.0, 2.0):
        indices = sample_tokens(
            jax.random.key(0), jnp.zeros((2, 12)), 5, jnp.full(2, sharpness), real
        )
        assert indices[0].tolist() == [0, 1, 2, 3, 4]
    features = jax.random.normal(jax.random.key(1), (2, 12, 3))
    score = jnp.tile(jnp.arange(12.0), (2, 1))  # Padding has the highest scores.
    _, clear = mix_noise(jax.random.key(2), features, score, real)
    assert not clear[0, 5:].any() and 2 <= clear[0].sum() <= 5


def test_all_images_of_a_batch_have_one_size():
    groups = np.array([0, 1, 0, 0, 1, 1, 0, 2, 1])
    epoch = [batch_indices(5, step, 2, groups) for step in range(4)]
    assert all(len(set(groups[rows])) == 1 for rows in epoch)
    assert len({*np.concatenate(epoch).tolist()}) == 8  # Group 2 is smaller than a batch.
    assert sorted(groups[rows[0]] for rows in epoch) == [0, 0, 1, 1]
    next_epoch = [batch_indices(5, step, 2, groups) for step in range(4, 8)]
    assert np.concatenate(epoch).tolist() != np.concatenate(next_epoch).tolist()


def test_a_run_trains_all_stages_and_answers_about_images_of_both_sizes(tmp_path):
    sizes = {"train": 8, "validation": 0, "test": 0, "sizes": (16, 24)}
    data = write_world(tmp_path / "data", seed=1, patches=True, **sizes)
    model_folder = pretrain(make_run(), tmp_path / "run", data)
    for stage, scalar in (("tower", "class_kind"), ("language", "lm_loss"), ("noise", "told")):
        assert all(np.isfinite(row[scalar]) for row in tiny_run.metrics(tmp_path / "run" / stage))
    model = load_vlm(model_folder, dtype=jnp.float32, progress=False)
    shape = small_qwen.make_backbone(make_run().model, model.tokenizer).config
    assert model.config == shape and (shape.min_pixels, shape.max_pixels) == (256, 576)
    images = [[data / "images" / f"train_00000{number}.png"] for number in range(2)]
    options = RunOptions(4)
    answers = generate(model, ["What is the background?"] * 2, images, options=options)
    assert [len(answer.kept_indices[0]) for answer in answers] == [4, 9]
