"""StepPrune in front of Gemma 3, in DeepMind's package `gemma` (4.0, which needs Python 3.12).

Weights are random and small, so that it runs on a CPU without a download. Copy the first part: it
serves `gm.nn.Gemma3_4B` and larger ones, whose images have 256 tokens, and changes nothing of them.
"""

import collections
import dataclasses
import functools
import timeit

import jax
import jax.numpy as jnp
import optax
from gemma import gm
from gemma.gm.utils import _types

import stepprune_jax as sp

EMPTY = -(2**30)  # about the position of a place without a token: outside of any sliding window
# [b, l] ids, [b, i, h, w, 3], [b, l] the words that a policy may read, and those of the loss.
Batch = collections.namedtuple("Batch", "tokens images question answer")


class PrunedGemma3(gm.nn.Transformer):
    """Gemma 3 that sees what `shorten` put among its weights, all that a sampler passes on."""

    def _encode_vision(self, images):
        return self.embedder.encode_vision(self.get_variable("params", "kept")["tokens"])

    def _encode_and_get_inputs(self, *, tokens, images=None, **given):
        inputs = super()._encode_and_get_inputs(tokens=tokens, images=images, **given)
        if images is None:
            return inputs
        index = self.get_variable("params", "kept")["index"]
        b, _, k = index.shape
        dropped = self.vision_encoder.siglip_exit.output_length - k  # of each image
        expanded = _types.Input(text=tokens, images=images, config=self.config.input_config)
        soft = expanded.tokens_with_mm < 0  # places of image tokens
        before = jnp.cumsum(soft, axis=1) - soft
        ahead = jnp.where(index < 0, EMPTY, index - jnp.arange(k)).reshape(b, -1)
        ahead = jnp.take_along_axis(ahead, before, axis=1, mode="clip")
        # Distances are those of the full sequence, and the last position is the one that the host
        # counts, since its sampler goes on from there: the first are negative.
        images_left = jnp.sum(soft, axis=1, keepdims=True) // k - before // k
        positions = inputs.positions + jnp.where(soft, ahead, 0) - dropped * images_left
        mask = inputs.attention_mask & (positions > EMPTY // 2)[:, None]
        return dataclasses.replace(inputs, positions=positions, attention_mask=mask)

    def _apply_attention(self, inputs, cache):
        if cache is not None:  # words decoded later do not see empty places, either
            seen = inputs.attention_mask & (cache["layer_0"]["positions"] > EMPTY // 2)[:, None]
            inputs = dataclasses.replace(inputs, attention_mask=seen)
        return super()._apply_attention(inputs, cache)


def look(host, params, batch):
    """Returns what a policy sees, a row for each image: tokens of the tower, text, its mask."""
    model = host.bind({"params": params})
    text = model.embedder.encode(batch.tokens)
    patches = model.vision_encoder.patchify_images(batch.images)
    image = model.vision_encoder(patches=patches, is_training=False)
    text, mask = (jnp.repeat(x, image.shape[1], axis=0) for x in (text, batch.question))
    return image.reshape(-1, *image.shape[2:]), text, mask


def shorten(host, params, tokens, index, rows):
    """Returns the model with k places an image, its weights with tokens [rows * i, k, d] in them.

    `index` says which of the image they are: [rows * i, k], -1 in the padding, or [k] for all.
    """
    k = tokens.shape[1]
    encoder = host.config.vision_encoder.clone(num_mm_tokens_per_image=k)
    config = dataclasses.replace(host.config, vision_encoder=encoder)
    index = jnp.broadcast_to(index, tokens.shape[:2]).reshape(rows, -1, k)
    kept = {"tokens": tokens.reshape(*index.shape, -1), "index": index}
    return PrunedGemma3(config=config, dtype=host.dtype), params | {"kept": kept}


@functools.partial(jax.jit, static_argnames=("host", "capacity"))
def pruned_logits(host, params, batch, policy, capacity):
    """Computes the logits [b, l, v] at the words, and which tokens of each image are kept."""
    image, text, mask = look(host, params, batch)
    pruned = policy.select(image, text, text_mask=mask, capacity=capacity)
    model, params = shorten(host, params, pruned.tokens, pruned.index, len(batch.tokens))
    return model.apply({"params": params}, batch.tokens, images=batch.images).logits, pruned.index


@functools.partial(jax.jit, static_argnames="host")
def grads_of(host, params, batch, policy, key):
    """Differentiates with respect to the policy's weights; those of the host are an argument."""
    image, text, mask = look(host, params, batch)

    def lm_loss(gated):  # all tokens, each as noisy as the policy decides
        model, weights = shorten(host, params, gated, jnp.arange(gated.shape[1]), len(batch.tokens))
        out = model.apply({"params": weights}, batch.tokens, images=batch.images)
        logits, words = out.logits[:, :-1].astype(jnp.float32), batch.tokens[:, 1:]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, words)
        return jnp.mean(loss, where=batch.answer[:, 1:])

    def loss(weights):
        return policy.replace(params=weights).train_loss(key, image, text, lm_loss, text_mask=mask)

    return jax.grad(loss, has_aux=True)(policy.params)


# --- With a small Gemma that is drawn: two images of 64 tokens, pooled from 256 patches ---

full, tower, key = gm.nn.Gemma3_4B.config, gm.nn.SigLiPFromPatches(), jax.random.key(0)
small = {"siglip_encoder": tower.siglip_encoder.clone(width=64, depth=2, mlp_dim=128)}
small |= {"siglip_exit": tower.siglip_exit.clone(output_length=64), "image_height": 224}
small |= {"num_mm_tokens_per_image": 64, "image_width": 224}
shape = {"num_embed": 512, "embed_dim": 512, "hidden_dim": 2048, "num_heads": 8, "head_dim": 64}
shape |= {"sliding_window_size": 96, "attention_types": full.attention_types[4:6]}
config = dataclasses.replace(full, vision_encoder=tower.clone(**small), **shape)
host = gm.nn.Transformer(config=config, dtype=jnp.float32)

tokens, place = jax.random.randint(key, (4, 27), 200, 500), jnp.tile(jnp.arange(27), (4, 1))
tokens = tokens.at[:, :3].set(jnp.array([2, 255_999, 255_999]))  # BOS, twice <start_of_image>
images = jax.random.randint(key, (4, 2, 224, 224, 3), 0, 256).astype(jnp.uint8)
batch = Batch(tokens, images, (place > 2) & (place < 19), place > 18)
params = jax.jit(host.init)(key, tokens, images=images)["params"]
unpruned = jax.jit(lambda params, x: host.apply({"params": params}, x.tokens, images=x.images))
run = functools.partial(pruned_logits, host, params)

image = jax.jit(look, static_argnames="host")(host, params, batch)[0]
n, width = image.shape[1:]
stats = sp.update_stats(sp.FeatureStats.start(width), image)
policy = sp.StepPrune.init(key, sp.PolicyConfig(width, 512, num_heads=4, max_steps=n), stats)
apart = run(batch, policy.with_budget(n), n)[0] - unpruned(params, batch).logits
print(f"with all {n} tokens, logits differ from the host's by up to {jnp.max(jnp.abs(apart))}")

optimizer = optax.adamw(1e-3)
grads, (metrics, _) = grads_of(host, params, batch, policy, key)
updates, _ = optimizer.update(grads, optimizer.init(policy.params), policy.params)
policy = policy.replace(params=optax.apply_updates(policy.params, updates))
print(f"loss {metrics['lm_loss']:.4f}: a step moves the policy by {optax.tree.norm(updates):.4f}")

budget = policy.with_budget(16)
others = [jnp.where(x, tokens[::-1], tokens) for x in (place < 0, batch.question, batch.answer)]
for pruner, capacity in ((budget, 16), (policy, 32)):  # at most 32 until it stops
    kept = [run(batch._replace(tokens=other), pruner, capacity)[1] for other in others]
    _, *new = (int(jnp.sum(jnp.any(index != kept[0], axis=1))) for index in kept)
    print(f"kept {jnp.sum(kept[0] >= 0, axis=1)}; {new} images differ for another question, answer")
print(f"compiled for all, for the budget and for the stop: {pruned_logits._cache_size()} programs")

calls = ("unpruned(params, batch)", "run(batch, budget, 16)")
clocks = [timeit.Timer(f"jax.block_until_ready({call})", globals=globals()) for call in calls]
own, pruned = jnp.median(jnp.array([[c.timeit(1) for c in clocks] for _ in range(21)]), axis=0)
print(f"16 of {n} tokens take {pruned / own:.2f} times as long, tower and policy included")
