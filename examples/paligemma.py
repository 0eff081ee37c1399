"""StepPrune in front of PaliGemma, with the torch model of `transformers`.

Weights are random and of a small shape, so that it runs in seconds without a download; with
`from_pretrained` the widths are 1,152 and 2,048. Needs torch and transformers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

import stepprune_jax as sp

tower = {"model_type": "siglip_vision_model", "patch_size": 14}
tower |= {"image_size": 224}  # 448: 1,024 tokens
tower |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
text = {"model_type": "gemma", "vocab_size": 128, "hidden_size": 48, "intermediate_size": 96}
text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12}
shape = PaliGemmaConfig(
    vision_config=tower | {"num_attention_heads": 2},
    text_config=text,
    projection_dim=48,
    image_token_id=127,
)
model = PaliGemmaForConditionalGeneration(shape).eval()  # .from_pretrained(...) here


@torch.no_grad()
def encode(pixels, ids):
    """SigLIP's features before the projector [b, n, d], embeddings of the prompt [b, l, e]."""
    features = model.model.vision_tower(pixels).last_hidden_state
    return jnp.asarray(features.numpy()), jnp.asarray(model.get_input_embeddings()(ids).numpy())


@torch.no_grad()
def first_logits(pruned, ids, num_tokens):
    """Logits of the first answer token after what was kept, [b, v]."""
    b, length = ids.shape
    tokens, valid = torch.tensor(np.array(pruned.tokens)), torch.tensor(np.array(pruned.valid))
    embedded = torch.cat(
        [model.model.multi_modal_projector(tokens), model.get_input_embeddings()(ids)], dim=1
    )
    # Positions count from 1. A kept token has its own, and text continues behind all N.
    index = torch.tensor(np.maximum(pruned.index, 0))
    after = torch.arange(num_tokens, num_tokens + length).expand(b, -1)
    mask = torch.cat([valid, torch.ones(b, length, dtype=torch.bool)], dim=1)
    logits = model(
        inputs_embeds=embedded,
        attention_mask=mask.long(),
        position_ids=torch.cat([index, after], dim=1) + 1,
        token_type_ids=torch.zeros_like(mask, dtype=torch.long),  # image and prompt: one prefix
    ).logits
    return logits[:, -1].numpy()


pixels = torch.randn(2, 3, 224, 224, generator=torch.manual_seed(0))
ids = torch.randint(2, 120, (2, 6), generator=torch.manual_seed(1))  # the prompt, "answer en ..."
features, words = encode(pixels, ids)
n = features.shape[1]  # 256
seen = sp.update_stats(sp.FeatureStats.start(32), features)
siglip = sp.PolicyConfig(feature_width=32, text_width=48, num_heads=4, max_steps=n)
gemma_policy = sp.Policy.init(jax.random.key(0), siglip, seen)
pruned = gemma_policy.prune(features, words, budget=64)
assert first_logits(pruned, ids, n).shape == (2, 128)

# If all tokens are kept, the answer is that of the unpruned model.
with torch.no_grad():
    whole = model(
        input_ids=torch.cat([torch.full((2, n), 127), ids], dim=1),
        pixel_values=pixels,
        token_type_ids=torch.zeros(2, n + 6, dtype=torch.long),
    ).logits[:, -1]
everything = gemma_policy.prune(features, words, budget=n)
np.testing.assert_allclose(first_logits(everything, ids, n), whole, atol=1e-4)
print("all tokens kept: the logits are those of the unpruned model")
