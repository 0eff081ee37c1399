"""What may influence what, read off gradients: a forbidden path has a gradient of exactly zero."""

import jax
import jax.numpy as jnp
import numpy as np
import prompts

from stepprune_jax.models import vlm


def test_no_later_token_and_no_padding_reaches_an_earlier_one(llava):
    _, config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())

    @jax.jit
    def influence(embeddings):
        """Jacobian norms [b, output slot, input slot] of one output channel's random mix."""

        def outputs(x):
            result = vlm.prefill(params, config, sequence._replace(hidden=x), 0, (), True)
            return result.logits[..., :3].sum(-1)

        # One reverse pass per output slot; rows of the batch do not mix, which is asserted too.
        def one(slot):
            return jax.grad(lambda x: outputs(x)[:, slot].sum())(embeddings)

        return jnp.abs(jax.lax.map(one, jnp.arange(embeddings.shape[1]))).max(-1).swapaxes(0, 1)

    found = np.asarray(influence(sequence.hidden))
    for row, length in enumerate(np.asarray(sequence.length)):
        inside = found[row, :length]
        later = np.triu(np.ones((length, length), bool), 1)
        assert (inside[:, length:] == 0).all(), "padding reaches a token"
        assert (inside[:, :length][later] == 0).all(), "a later token reaches an earlier one"
        assert (inside[:, :length][~later] > 0).all(), "an earlier token does not reach a later one"


def test_loss_reaches_kept_visual_tokens_only(llava):
    _, config, params = llava
    batch = prompts.batch(noise=1.0)

    @jax.jit
    def gradient(tokens):
        def loss(tokens):
            visual = batch.visual._replace(tokens=tokens)
            sequence = prompts.assemble(params, config, *batch._replace(visual=visual))
            return jnp.square(vlm.prefill(params, config, sequence, 0).logits).sum()

        return jax.grad(loss)(tokens)

    found = jnp.abs(gradient(batch.visual.tokens)).max(-1) > 0
    np.testing.assert_array_equal(found, batch.visual.valid)


def test_decoding_reads_no_row_but_its_own(llava):
    _, config, params = llava
    sequence = prompts.assemble(params, config, *prompts.batch())
    cache = jax.jit(vlm.prefill, static_argnums=(1, 3))(params, config, sequence, 2).cache

    @jax.jit
    def gradient(key):
        def loss(key):
            logits, _ = vlm.decode_step(params, config, jnp.arange(5), cache._replace(key=key))
            return logits[1].sum()

        return jax.grad(loss)(key)

    found = (jnp.abs(gradient(cache.key)) > 0).any((0, 2, 4))
    filled = jnp.arange(cache.key.shape[3]) < cache.length[1]
    np.testing.assert_array_equal(found, (jnp.arange(5) == 1)[:, None] & filled)
