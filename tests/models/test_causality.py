"""Gradients show which inputs influence an output: forbidden paths have a gradient of exactly 0."""

import jax
import jax.numpy as jnp
import numpy as np
import prompts

from stepprune_jax.models import vlm


def test_later_tokens_and_padding_do_not_influence_earlier_tokens(llava):
    _, config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())

    @jax.jit
    def influence(embeddings):
        """Computes the largest gradient [b, output slot, input slot] of three summed logits."""

        def outputs(x):
            result = vlm.prefill(params, config, sequence._replace(hidden=x), 0, all_logits=True)
            return result.logits[..., :3].sum(-1)

        # One reverse pass per output slot computes the gradients of all rows, which do not mix.
        def slot_gradient(slot):
            return jax.grad(lambda x: outputs(x)[:, slot].sum())(embeddings)

        return (
            jnp.abs(jax.lax.map(slot_gradient, jnp.arange(embeddings.shape[1])))
            .max(-1)
            .swapaxes(0, 1)
        )

    norms = np.asarray(influence(sequence.hidden))
    for row, length in enumerate(np.asarray(sequence.length)):
        row_norms = norms[row, :length]
        later = np.triu(np.ones((length, length), bool), 1)
        assert (row_norms[:, length:] == 0).all(), "padding reaches a token"
        assert (row_norms[:, :length][later] == 0).all(), "a later token reaches an earlier one"
        assert (row_norms[:, :length][~later] > 0).all(), (
            "an earlier token does not reach a later one"
        )


def test_only_kept_visual_tokens_get_a_gradient(llava):
    _, config, params = llava
    batch = prompts.batch(noise=1.0)

    @jax.jit
    def gradient(tokens):
        def loss(tokens):
            visual = batch.visual._replace(tokens=tokens)
            sequence = prompts.assemble(params, config, *batch._replace(visual=visual))
            return jnp.square(vlm.prefill(params, config, sequence, 0).logits).sum()

        return jax.grad(loss)(tokens)

    has_gradient = jnp.abs(gradient(batch.visual.tokens)).max(-1) > 0
    np.testing.assert_array_equal(has_gradient, batch.visual.valid)


def test_decoding_reads_only_the_cache_of_the_same_row(llava):
    _, config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    cache = jax.jit(vlm.prefill, static_argnums=(1, 3))(params, config, sequence, 2).cache

    @jax.jit
    def gradient(key):
        def loss(key):
            logits, _ = vlm.decode_step(params, config, jnp.arange(5), cache._replace(key=key))
            return logits[1].sum()

        return jax.grad(loss)(key)

    has_gradient = (jnp.abs(gradient(cache.key)) > 0).any((0, 2, 4))
    is_filled = jnp.arange(cache.key.shape[3]) < cache.length[1]
    np.testing.assert_array_equal(has_gradient, (jnp.arange(5) == 1)[:, None] & is_filled)
