"""StepPrune in front of openpi's pi0: the cameras' tokens, between SigLIP and PaliGemma.

Needs openpi. Weights are random and small, so that it runs on a CPU without a download. Copy the
first part: it serves pi0 and pi0.5 of any size, and changes nothing of openpi.
"""

import timeit
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from openpi.models import model, pi0, pi0_config, siglip
from openpi.shared.nnx_utils import module_jit

import stepprune_jax as sp

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class Pi0View:
    """pi0 at an observation: what a policy sees, and pi0 reading other tokens of the cameras.

    All cameras are one set: the policy compares them, and spends a budget on those that matter.
    pi0 counts positions along its mask, and knows a camera by them alone. So kept tokens have the
    positions that they had, and what follows starts where it would without pruning.
    """

    compute_loss, sample_actions = pi0.Pi0.compute_loss, pi0.Pi0.sample_actions

    def __init__(self, host, observation):
        tokens, mask, _ = host.embed_prefix(observation)
        n = tokens.shape[1] - observation.tokenized_prompt.shape[1]
        self.image, self.text = tokens[:, :n], tokens[:, n:]  # [b, n, e], [b, l, e]
        self.masks = {"image_mask": mask[:, :n], "text_mask": mask[:, n:]}
        self.place = jnp.cumsum(mask, axis=1) - 1
        self.host, self.PaliGemma = host, self  # pi0's methods call self.PaliGemma.llm

    def __getattr__(self, name):
        return getattr(self.host, name)

    def read(self, pruned):
        """Sets what pi0 reads in place of the cameras' tokens; returns itself."""
        kept = jnp.take_along_axis(self.place, jnp.maximum(pruned.index, 0), axis=1)
        self.position = jnp.concatenate([kept, self.place[:, self.image.shape[1] :]], axis=1)
        mask = jnp.concatenate([pruned.valid, self.masks["text_mask"]], axis=1)
        self.dropped = self.place[:, -1:] + 1 - jnp.sum(mask, axis=1, keepdims=True)
        tokens = jnp.concatenate([pruned.tokens, self.text], axis=1)
        self.prefix, self.index = (tokens, mask, jnp.zeros(mask.shape[1], bool)), pruned.index
        return self

    def embed_prefix(self, observation):
        """Replaces pi0's tokens."""
        return self.prefix

    def llm(self, tokens, *, positions, **rest):
        """Replaces the positions, which pi0 has counted along the shorter mask."""
        positions = positions + self.dropped
        if tokens[0] is not None:
            positions = positions.at[:, : self.position.shape[1]].set(self.position)
        return self.host.PaliGemma.llm(tokens, positions=positions, **rest)


class PrunedPi0(nnx.Module):
    """pi0 and a policy, which keeps `budget` tokens or as many as its stop says, as one model."""

    def __init__(self, host, policy, capacity, budget=None):
        self.host, self.policy = host, nnx.Variable(policy)
        self.capacity, self.budget = capacity, budget

    def view(self, observation, rng=None, train=False):
        """Returns pi0 reading what is kept of an observation."""
        view = Pi0View(self.host, model.preprocess_observation(rng, observation, train=train))
        sizes = {"capacity": self.capacity, "budget": self.budget, "max_steps": self.capacity}
        return view.read(self.policy.value.select(view.image, view.text, **view.masks, **sizes))

    def sample_actions(self, rng, observation, **keywords):
        """As pi0's."""
        return self.view(observation).sample_actions(rng, observation, **keywords)

    def compute_loss(self, rng, observation, actions, *, train=False):
        """As pi0's, which augments with the first of three keys."""
        view = self.view(observation, jax.random.split(rng, 3)[0], train)
        return view.compute_loss(rng, observation, actions)


@jax.jit
def update(policy, moments, host, key, observation, actions, share):
    """Takes a step of the policy; pi0, (graph, weights), is an argument without a gradient."""
    gate_key, flow_key = jax.random.split(key)
    view = Pi0View(nnx.merge(*host), observation)
    index = jnp.arange(view.image.shape[1])[None]

    def flow_loss(gated):  # all tokens, each as noisy as the policy decides
        view.read(sp.Pruned(index, gated, view.masks["image_mask"], count=None))
        return view.compute_loss(flow_key, observation, actions).mean()

    def loss(params):
        own, given = policy.replace(params=params), (view.image, view.text, flow_loss)
        return own.train_loss(gate_key, *given, **view.masks, progress=sp.Progress(share))

    grads, (metrics, _) = jax.grad(loss, has_aux=True)(policy.params)
    updates, moments = optimizer.update(grads, moments, policy.params)
    return policy.replace(params=optax.apply_updates(policy.params, updates)), moments, metrics


# --- With a small pi0 that is drawn ---

dummy = {"paligemma_variant": "dummy", "action_expert_variant": "dummy", "dtype": "float32"}
config = pi0_config.Pi0Config(**dummy)
tower, small = siglip.Module, {"variant": "mu/14", "head_zeroinit": False}  # else it is So400m
with mock.patch.object(siglip, "Module", lambda **given: tower(**given | small)):
    host = config.create(jax.random.key(0))
key, actions, seen = jax.random.key(1), config.fake_act(4), config.fake_obs(4)
scene = jax.random.uniform(key, (3, 1, *model.IMAGE_RESOLUTION, 3), minval=-1)
seen = seen.replace(  # four prompts in one scene; the last robot has one wrist
    images=dict(zip(seen.images, jnp.repeat(scene, 4, axis=1), strict=True)),
    image_masks=seen.image_masks | {"right_wrist_0_rgb": jnp.arange(4) < 3},
    tokenized_prompt=jax.random.randint(key, seen.tokenized_prompt.shape, 0, 1000),
)
view = Pi0View(host, seen)
n, width = view.image.shape[1:]
stats = sp.update_stats(sp.FeatureStats.start(width), view.image, view.masks["image_mask"])
policy = sp.StepPrune.init(key, sp.PolicyConfig(width, width, num_heads=4, max_steps=96), stats)
moments, parts = optimizer.init(policy.params), nnx.split(host)
start, held = jax.device_get((policy.params, parts[1]))
for number, step in enumerate(jax.random.split(key, 3)):
    policy, moments, metrics = update(policy, moments, parts, step, seen, actions, number / 3)
for name, now, then in (("policy", policy.params, start), ("pi0", nnx.state(host), held)):
    moved = jax.tree.map(lambda now, then: jnp.max(jnp.abs(now - then)), now, then)
    print(f"weights of {name} moved by up to {max(jax.tree.leaves(moved)):.4f}")

full = PrunedPi0(host, policy, capacity=n, budget=n)
for name, given in {"compute_loss": (key, seen, actions), "sample_actions": (key, seen)}.items():
    own, pruned = (module_jit(getattr(m, name))(*given) for m in (host, full))
    print(f"{name} differs by {jnp.max(jnp.abs(own - pruned))} with all {n} tokens kept")
stopping = nnx.split(PrunedPi0(host, policy.replace(stop_bias=1.0), capacity=96))
keep = jax.jit(lambda parts, seen: nnx.merge(*parts).view(seen).index)
for prompts in (seen.tokenized_prompt, seen.tokenized_prompt[::-1]):
    index = keep(stopping, seen.replace(tokenized_prompt=prompts))
    print("kept of each camera:", *(jnp.sum(index // 256 == i, axis=1) for i in range(3)))
print(f"programs of both batches: {keep._cache_size()}")
one, times = jax.tree.map(lambda x: x[:1], seen), []
for robot in (host, PrunedPi0(host, policy, capacity=64, budget=64)):
    act = module_jit(robot.sample_actions)
    run = timeit.Timer("jax.block_until_ready(act(key, one))", "act(key, one)", globals=globals())
    times.append(sorted(run.repeat(9, number=1))[4])
print(f"actions with 64 of {n} tokens take {times[1] / times[0]:.2f} times as long")
