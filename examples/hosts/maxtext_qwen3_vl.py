"""StepPrune in front of MaxText's Qwen3-VL: logits, generation, programs, training, time.

MaxText's code is used as it is; its weights are random and of a small shape. An image enters
Qwen3-VL as input and again, as features from inside the tower, behind the first layers (DeepStack).
Side by side they are one token to the policy, so that nothing evades what it decides.
"""

import timeit

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from maxtext.common.common_types import MultimodalInput
from maxtext.multimodal.processor_qwen3_omni import QwenTokens, get_rope_index
from maxtext.utils.max_utils import cross_entropy_with_logits

import stepprune_jax as sp

# --- MaxText's model, and batches with the names of its trainer ---
SIDE, WORDS, KEPT = 32, 20, 64  # SIDE counts patches, of which four make a token
N, V = (SIDE // 2) ** 2, 512  # special tokens lie beyond the small vocabulary: read as its last
NEW_WORDS, PREFILL = 4, 2 * KEPT + 2 + WORDS  # PREFILL: length of the longest pruned sequence
LENGTH = -(-(PREFILL + NEW_WORDS) // 8) * 8  # MaxText needs a whole number for each device
# MaxText's batch has `per_device_batch_size` rows for each device of the process, here 2 in all.
options = f"""model_name=qwen3-vl-2b override_model_config=true skip_jax_distributed_system=true
    attention=dot_product scan_layers=false vocab_size={V} base_emb_dim=512 base_mlp_dim=2048
    dtype=float32 hidden_size_for_vit=64 intermediate_size_for_vit=128 num_attention_heads_for_vit=1
    num_hidden_layers_for_vit=3 out_hidden_size_for_vit=512 deepstack_visual_indexes_for_vit=[0,1,2]
    base_num_decoder_layers=4 base_num_query_heads=4 base_num_kv_heads=2
    max_prefill_predict_length={PREFILL} max_target_length={LENGTH}
    per_device_batch_size={2 / jax.device_count()}"""
config = maxtext.pyconfig.initialize(["", *options.split()])
model = maxtext.from_config(config, devices=jax.devices()[:1], rngs=nnx.Rngs(0))
structure, weights = nnx.as_pure(nnx.split(model))  # each trace merges variables of its own
special = QwenTokens(config)


def draw(seed):
    """Draws two rows of an image, a question of some length, an answer of four words, padding."""
    random = np.random.default_rng(seed)
    image = [special.vision_start, *[special.image_pad] * N, special.vision_end]
    tokens = np.hstack([[image] * 2, random.integers(0, V - 1, (2, WORDS))])
    place = np.arange(-N - 2, WORDS) - random.integers(6, WORDS - 3, (2, 1))  # 0: the answer
    real, grid = (place < 4).astype(int), np.array([[1, SIDE, SIDE]] * 2)
    position, _ = get_rope_index(tokens, grid, attention_mask=real, config=config)
    batch = {"inputs": tokens * real, "inputs_position": position, "inputs_segmentation": real}
    batch |= {"targets": np.roll(tokens, -1, 1), "targets_segmentation": (place > -2) & (place < 3)}
    pixels = random.normal(size=(2, 3, 2, 16 * SIDE, 16 * SIDE))
    return jax.tree.map(jnp.int32, batch), jnp.float32(pixels)


@jax.jit
def plain_forward(weights, batch, pixels):
    """Returns MaxText's own logits."""
    given = batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"]
    return nnx.merge(structure, weights)(*given, encoder_images=pixels, enable_dropout=False)


# --- The seam ---
def read(model, batch, pixels):
    """Returns tokens with DeepStack features [b, n, 4 e], words ahead of the answer, their mask."""
    merged, deep = model.vision_encoder(pixels, deterministic=True)
    learned, real = batch["targets_segmentation"], batch["inputs_segmentation"] > 0
    ahead = real & (batch["inputs"] != special.image_pad) & (jnp.cumsum(learned, 1) <= learned)
    words = pack(batch, ahead, WORDS)
    text, mask = model.token_embedder(words["inputs"]), words["inputs_segmentation"] > 0
    return jnp.concatenate([merged, *deep], axis=-1), text, mask


def language_model(model, batch, image, mode="train"):
    """Returns logits, as MaxText's model behind its tower; placeholders stand for `image`."""
    merged, *deep = jnp.split(image, image.shape[-1] // config.emb_dim, axis=-1)
    place = batch["inputs"] == special.image_pad
    given = batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], True
    seen = MultimodalInput(image_embeddings=merged, bidirectional_mask=place)
    seen = {"multimodal_input": seen, "deepstack_visual_embeds": deep}
    return model.decoder(model.token_embedder, *given, **seen, model_mode=mode)[0]


def pack(batch, keep, size):
    """Moves each row's places to keep, with their positions, to the front; zeros behind them."""
    place = jnp.argsort(~keep, axis=1, stable=True)[:, :size]
    take = jax.vmap(lambda x, place, keep: (x[place].T * keep[place]).T)
    return {name: take(x, place, keep) for name, x in batch.items()}


def shorten(model, capacity, policy, batch, pixels):
    """Returns the shorter batch, and what the policy kept, at most `capacity` tokens an image.

    Rows keep different numbers of tokens. `inputs_segmentation` of the result is the mask per
    token: 1 for a kept token or a word, 0 for the padding behind them.
    """
    image, text, mask = read(model, batch, pixels)
    pruned = policy.select(image, text, text_mask=mask, capacity=capacity)
    place, real = batch["inputs"] == special.image_pad, batch["inputs_segmentation"] > 0
    number = jnp.cumsum(place, axis=1) - 1
    keep = real & (~place | (number[..., None] == pruned.index[:, None]).any(axis=2))
    return pack(batch, keep, place.shape[1] - N + pruned.index.shape[1]), pruned


@jax.jit(static_argnums=0)
def pruned_forward(capacity, policy, weights, batch, pixels):
    """Returns logits of a shorter sequence, and what the policy kept, at most `capacity` tokens."""
    model = nnx.merge(structure, weights)
    batch, pruned = shorten(model, capacity, policy, batch, pixels)
    return language_model(model, batch, pruned.tokens), pruned


@jax.jit
def update(policy, weights, key, batch, pixels):
    """Takes a step of training with MaxText's loss; own_model.py has an optimizer."""
    image, text, mask = read(nnx.merge(structure, weights), batch, pixels)

    def lm_loss(tokens):
        logits = language_model(nnx.merge(structure, weights), batch, tokens)
        loss, _ = cross_entropy_with_logits(logits, jax.nn.one_hot(batch["targets"], V))
        return jnp.average(loss, weights=batch["targets_segmentation"])

    def loss(params):
        return policy.replace(params=params).train_loss(key, image, text, lm_loss, text_mask=mask)

    grads, _ = jax.grad(loss, has_aux=True)(policy.params)
    return policy.replace(params=jax.tree.map(lambda x, g: x - 1e-3 * g, policy.params, grads))


# --- Generation: one pruned prefill, then a word at a time from MaxText's KV cache ---
def build_cached(mode):
    """Returns the structure and the initial state of MaxText's model with a KV cache."""
    cached = maxtext.from_config(config, mesh=model.mesh, model_mode=mode, rngs=nnx.Rngs(0))
    return nnx.as_pure(nnx.split(cached))


def merge_cached(built, *states):
    """Builds the model with a KV cache from weights and, where given, cached values."""
    graph, initial = built
    return nnx.merge(graph, nnx.merge_state(initial, *states))


@jax.jit(static_argnums=0)
def prefill(capacity, policy, weights, batch, pixels):
    """Returns logits [b, V] after the question, the next word's position [b, 1], and the cache.

    The cache stores the mask per token, so no later word attends to the padding of its row.
    """
    learned, real = batch["targets_segmentation"], batch["inputs_segmentation"]
    question = real * (jnp.cumsum(learned, axis=1) <= learned)
    batch = batch | {"inputs_segmentation": question, "targets_segmentation": 0 * learned}
    model = merge_cached(prefill_model, weights)
    batch, pruned = shorten(model, capacity, policy, batch, pixels)
    missing = PREFILL - batch["inputs"].shape[1]  # the cache has PREFILL places
    batch = {
        name: jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))
        for name, x in batch.items()
    }
    logits = language_model(model, batch, pruned.tokens, "prefill")
    last = jnp.sum(batch["inputs_segmentation"], axis=1) - 1
    position = jnp.max(batch["inputs_position"].reshape(len(last), -1), axis=1)[:, None] + 1
    return logits[jnp.arange(len(last)), last], position, nnx.as_pure(nnx.state(model, nnx.Cache))


@jax.jit
def decode(weights, cache, word, position):
    """Returns logits [b, V] after `word` [b, 1], and the cache with the word."""
    model = merge_cached(decode_model, weights, cache)
    logits = model(word, position, enable_dropout=False, model_mode="autoregressive")
    return logits[:, 0], nnx.as_pure(nnx.state(model, nnx.Cache))


def generate(capacity, policy, weights, batch, pixels):
    """Returns the words [b, NEW_WORDS] of greedy decoding, and their logits [b, NEW_WORDS, V]."""
    logits, position, cache = prefill(capacity, policy, weights, batch, pixels)
    steps = [logits]
    for step in range(NEW_WORDS - 1):
        word = jnp.argmax(logits, axis=-1)[:, None]
        logits, cache = decode(weights, cache, word, position + step)
        steps.append(logits)
    logits = jnp.stack(steps, axis=1)
    return jnp.argmax(logits, axis=-1), logits


def answer_with(batch, words):
    """Returns the batch with generated words [b, NEW_WORDS] in the places of the answer."""
    row, place = jnp.nonzero(batch["targets_segmentation"], size=words.size)
    return batch | {"inputs": batch["inputs"].at[row, place + 1].set(words.ravel())}


# --- What holds ---
batch, pixels = draw(0)
image, text, _ = read(model, batch, pixels)
stats = sp.update_stats(sp.FeatureStats.start(image.shape[2]), image)
shape = sp.PolicyConfig(image.shape[2], text.shape[2], width=64, num_heads=4, max_steps=N)
policy = sp.StepPrune.init(jax.random.key(0), shape, stats).calibrate([(image, text[:, :8])])
policy = jax.device_put(policy, jax.NamedSharding(model.mesh, jax.P()))  # where the weights are
given, host = (policy, weights, batch, pixels), plain_forward(weights, batch, pixels)
off = jnp.abs(pruned_forward(N, policy.with_budget(N), *given[1:])[0] - host)
print(f"{N} of {N} tokens: logits off by {off[batch['inputs_segmentation'] > 0].max()}")
compiled, tell = [], jax.monitoring.register_event_duration_secs_listener
tell(lambda event, _, **about: compiled.append((event.split("/")[-1], about.get("fun_name"))))
for capacity, budget in ((2 * KEPT, f"mean:{KEPT}"), (KEPT, KEPT)):
    pruner, before = policy.with_budget(budget), len(compiled)
    counts = [pruned_forward(capacity, pruner, weights, *draw(seed))[1].count for seed in range(3)]
    programs = compiled[before:].count(("backend_compile_duration", "jit(pruned_forward)"))
    print(f"{budget}: tokens of six images {np.ravel(counts)}, programs {programs}")

prefill_model, decode_model = build_cached("prefill"), build_cached("autoregressive")
for capacity, budget in ((2 * KEPT, f"mean:{KEPT}"), (KEPT, KEPT)):
    pruner = policy.with_budget(budget)
    words, _ = generate(capacity, pruner, *given[1:])
    print(f"{budget}: generated words {words.tolist()}")

kept = pruned_forward(KEPT, pruner, *given[1:])[1].index
for learned, name in enumerate(("question", "answer")):
    place = jnp.roll(batch["targets_segmentation"], 1, axis=1) == learned
    other = batch | {"inputs": jnp.where(place, draw(1)[0]["inputs"], batch["inputs"])}
    now = pruned_forward(KEPT, pruner, weights, other, pixels)[1].index
    print(f"another {name}: {(now[..., None] != kept[:, None]).all(2).sum()} other tokens are kept")

trained = policy
for key in jax.random.split(jax.random.key(1), 3):
    trained = update(trained, weights, key, batch, pixels)
moved = jax.tree.map(lambda x, y: bool((x != y).any()), policy.params, trained.params)
same = np.array_equal(host, plain_forward(weights, batch, pixels))
print(f"training: policy changed {all(jax.tree.leaves(moved))}, MaxText's logits same {same}")
runs = (
    lambda: jax.block_until_ready(plain_forward(weights, batch, pixels)),
    lambda: jax.block_until_ready(pruned_forward(KEPT, pruner, *given[1:])),
)
plain, pruned = np.median([[timeit.timeit(run, number=1) for run in runs] for _ in range(9)], 0)
print(f"{plain:.3f} s without pruning, {pruned:.3f} s with it, ratio {plain / pruned:.2f}")
