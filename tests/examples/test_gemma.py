"""The example in front of Gemma 3, where `gemma` 4 is installed (Python 3.12, jax 0.11)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_ins
from host_example import numbers, run_example

import stepprune_jax as sp

pytest.importorskip("gemma", "4", reason="gemma 4 is not installed: docs/hosts.md says how")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # gemma warns of its own


@pytest.fixture(scope="module")
def example():
    return run_example("gemma3.py")


def test_the_signatures_are_those_of_the_package():
    assert stand_ins.changed_signatures("gemma") == []


def uneven(example):
    """Kept tokens of eight images in between one and all of 32 places; the others hold anything."""
    image, text, mask = example.look(example.host, example.params, example.batch)
    pruned = example.policy.select(image, text, text_mask=mask, capacity=32, budget=32)
    count = jnp.array([3, 20, 32, 1, 7, 15, 29, 4])
    valid = jnp.arange(32) < count[:, None]
    anything = jax.random.normal(jax.random.key(1), pruned.tokens.shape)
    tokens = jnp.where(valid[..., None], pruned.tokens, anything)
    return sp.Pruned(jnp.where(valid, pruned.index, -1), tokens, valid, count)


def logits_of(example, batch, pruned):
    """Logits of sequences with the kept tokens."""
    given = (pruned.tokens, pruned.index, len(batch.tokens))
    model, params = example.shorten(example.host, example.params, *given)
    return model.apply({"params": params}, batch.tokens, images=batch.images).logits


def test_all_tokens_give_the_hosts_own_logits(example):
    (difference,) = numbers(r"differ from the host's by up to (\S+)", example.printed)
    assert difference < 1e-5


def test_a_step_moves_the_policy_alone(example):
    (moved,) = numbers(r"a step moves the policy by (\S+)", example.printed)
    assert moved > 0
    assert jax.tree.structure(example.grads) == jax.tree.structure(example.policy.params)


def test_the_hosts_weights_are_an_argument(example):
    given = (example.batch, example.policy, jax.random.key(7))
    _, (metrics, _) = example.grads_of(example.host, example.params, *given)
    programs = example.grads_of._cache_size()
    others = jax.tree.map(lambda weight: 1.1 * weight, example.params)
    _, (other, _) = example.grads_of(example.host, others, *given)
    assert abs(metrics["lm_loss"] - other["lm_loss"]) > 1e-3
    assert example.grads_of._cache_size() == programs == 1


def test_the_question_is_read_and_the_answer_is_not(example):
    changed = re.findall(r"\[(\d), (\d)\] images differ", example.printed)
    assert len(changed) == 2
    assert all(int(question) > 4 and answer == "0" for question, answer in changed)


def test_one_program_serves_every_question_image_and_stop(example):
    assert numbers(r"(\d+) programs", example.printed) == [3]
    batch, means = example.batch._replace(images=example.images[::-1]), []
    for bias in (-2.0, 2.0):
        index = example.run(batch, example.policy.replace(stop_bias=bias), 32)[1]
        means.append(np.mean(np.sum(index >= 0, axis=1)))
    assert means[0] > means[1] + 2
    assert example.pruned_logits._cache_size() == 3


@pytest.mark.parametrize("images", [2, 1])
def test_pruning_is_hiding_the_other_tokens_from_the_host(example, images):
    """Positions, window and mask are those of the full sequence; a row may have fewer images."""
    from gemma.gm.utils import _types

    batch, pruned = example.batch, uneven(example)
    if images == 1:
        batch = batch._replace(tokens=batch.tokens.at[1, 2].set(300))
    config = example.host.config.input_config
    expanded = _types.Input(text=batch.tokens, images=batch.images, config=config)
    seen = np.array(expanded.tokens_with_mm >= 0)
    kept = np.sum(np.eye(example.n, dtype=bool)[pruned.index] & pruned.valid[..., None], axis=1)
    for row, of_images in enumerate(kept.reshape(4, -1) > 0):
        places = np.flatnonzero(~seen[row])
        seen[row, places] = of_images[: len(places)]
    hidden = expanded.attention_mask & seen[:, None]
    given = {"images": batch.images, "attention_mask": hidden}
    want = example.host.apply({"params": example.params}, batch.tokens, **given).logits
    np.testing.assert_allclose(logits_of(example, batch, pruned), want, atol=1e-5)


def test_the_packages_own_sampler_continues_after_the_kept_tokens(example):
    from gemma import gm

    class Ids(gm.testing.DummyTokenizer):
        """Words are ids."""

        def encode(self, text, *, add_bos=False, add_eos=False):
            return [2] * add_bos + [int(word) for word in text.split()]

        def decode(self, ids):
            return " ".join(str(int(word)) for word in np.ravel(ids))

    batch, pruned = example.batch, uneven(example)
    tokens = batch.tokens[:, :19]
    for _ in range(4):
        logits = logits_of(example, batch._replace(tokens=tokens), pruned)[:, -1]
        tokens = jnp.concatenate([tokens, jnp.argmax(logits, axis=1, keepdims=True)], axis=1)

    given = (pruned.tokens, pruned.index, len(tokens))
    model, params = example.shorten(example.host, example.params, *given)
    sizes = {"cache_length": 128, "max_out_length": 4, "pad_length": None}
    sampler = gm.text.Sampler(model=model, params=params, tokenizer=Ids(), stop_tokens=(), **sizes)
    prompts = [" ".join(map(str, row[1:19])) for row in np.asarray(tokens)]
    words = sampler.sample(prompts, images=list(batch.images), max_new_tokens=4)
    want = [" ".join(map(str, row[19:])) for row in np.asarray(tokens)]
    assert words == want
