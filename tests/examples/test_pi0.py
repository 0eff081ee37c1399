"""The example in front of openpi's pi0, where openpi is installed (jax 0.5.3, flax 0.10.2)."""

import re
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_ins
from host_example import numbers, run_example

import stepprune_jax as sp

pytest.importorskip("openpi", reason="openpi is not installed: docs/hosts.md says how")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # openpi warns of its own


@pytest.fixture(scope="module")
def example():
    return run_example("pi0.py")


def test_the_signatures_are_those_of_the_package():
    assert stand_ins.changed_signatures("openpi") == []


def test_all_tokens_give_the_hosts_own_result(example):
    differences = numbers(r"differs by (\S+) with all 768", example.printed)
    assert len(differences) == 2 and max(differences) < 1e-5


def test_training_moves_the_policy_and_nothing_else(example):
    policy, pi0 = numbers(r"moved by up to (\S+)", example.printed)
    assert policy > 0 and pi0 == 0


def test_the_hosts_weights_are_an_argument(example):
    """Given none, it moves nothing: the loss is the mean square of what it should say."""
    graph, weights = example.parts
    key, actions = jax.random.key(7), example.actions
    given = (example.policy, example.moments, (graph, jax.tree.map(jnp.zeros_like, weights)))
    *_, metrics = example.update(*given, key, example.seen, actions, 1.0)
    noise_key = jax.random.split(jax.random.split(key)[1], 3)[1]
    velocity = jax.random.normal(noise_key, actions.shape) - actions
    np.testing.assert_allclose(metrics["lm_loss"], jnp.mean(velocity**2), rtol=1e-5)


def test_the_stop_counts_by_prompt_and_skips_a_camera_that_is_masked_out(example):
    lines = re.findall(r"each camera: (\[.*?\]) (\[.*?\]) (\[.*?\])", example.printed)
    first, turned = (np.array([numbers(r"\d+", row) for row in line]) for line in lines)
    assert first[2, 3] == turned[2, 3] == 0 and (first[:, :3] > 0).all()
    counts = first.sum(axis=0)[:3]
    assert len(set(counts)) > 1 and counts.max() <= 96
    # Rows 1 and 2 see the same, and have exchanged prompts.
    np.testing.assert_array_equal(first[:, [1, 2]], turned[:, [2, 1]])
    assert "programs of both batches: 1\n" in example.printed


def test_positions_are_those_of_the_whole_prefix(example):
    """By hand: three cameras of two tokens, the second masked out; two words, one is padding."""
    mask = jnp.array([[1, 1, 0, 0, 1, 1, 1, 0]], bool)
    llm = mock.Mock()
    host = SimpleNamespace(
        embed_prefix=lambda _: (jnp.zeros((1, 8, 3)), mask, None),
        PaliGemma=SimpleNamespace(llm=llm),
    )
    view = example.Pi0View(host, SimpleNamespace(tokenized_prompt=jnp.zeros((1, 2), int)))
    valid = jnp.array([[True, True, False]])
    view.read(sp.Pruned(jnp.array([[0, 5, -1]]), jnp.zeros((1, 3, 3)), valid, None))
    _, short, _ = view.embed_prefix(None)
    prefix, suffix = jnp.zeros((1, 5, 3)), jnp.zeros((1, 2, 3))
    after = jnp.sum(short, axis=1, keepdims=True) + jnp.arange(2)  # as pi0 counts
    view.llm([prefix, None], positions=jnp.cumsum(short, axis=1) - 1)
    view.llm([None, suffix], positions=after)
    first, second = (np.array(call.kwargs["positions"]) for call in llm.call_args_list)
    assert first[short].tolist() == [0, 3, 4]
    assert second.tolist() == [[5, 6]]


def test_dropping_a_token_equals_masking_it(example):
    """And not with the positions that pi0 counts along the shorter mask."""

    class Compact(example.Pi0View):
        def llm(self, tokens, **rest):
            return self.host.PaliGemma.llm(tokens, **rest)

    @jax.jit
    def losses(parts, policy, seen, actions):
        def loss(kind, image, valid, index):
            view = kind(host, seen).read(sp.Pruned(index, image, valid, None))
            return view.compute_loss(jax.random.key(0), seen, actions)

        host = example.nnx.merge(*parts)
        view = example.Pi0View(host, seen)
        kept = policy.select(view.image, view.text, **view.masks, capacity=64, budget=64)
        every = jnp.arange(view.image.shape[1])[None]
        masked = jnp.any(every[..., None] == kept.index[:, None], axis=2)
        short = (kept.tokens, kept.valid, kept.index)
        whole = loss(example.Pi0View, view.image, masked, every)
        return whole, loss(example.Pi0View, *short), loss(Compact, *short)

    whole, dropped, compact = losses(example.parts, example.policy, example.seen, example.actions)
    np.testing.assert_allclose(dropped, whole, rtol=1e-4)
    assert not np.allclose(compact, whole, rtol=1e-3)


def test_pi05_in_half_precision_gives_its_own_result(example):
    other = example.dummy | {"dtype": "bfloat16", "pi05": True, "max_token_len": 48}
    config = example.pi0_config.Pi0Config(**other)
    build = lambda **given: example.tower(**given | example.small)  # noqa: E731
    with mock.patch.object(example.siglip, "Module", build):
        host = config.create(jax.random.key(0))
    full = example.PrunedPi0(host, example.policy, capacity=768, budget=768)
    given = (jax.random.key(1), example.seen, example.actions)
    own, pruned = (example.module_jit(m.compute_loss)(*given) for m in (host, full))
    np.testing.assert_allclose(pruned, own, rtol=1e-2)
