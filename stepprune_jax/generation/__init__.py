"""From a loaded model, prompts and pictures to answers.

The pieces compose: `read_request` (host), `prepare` (tower, pruning, assembly), `start`, `advance`
and `decode` (the language model), `sample`. `generate` and `stream` do all of it.
"""

from stepprune_jax.generation.answer import Answer, generate, stream
from stepprune_jax.generation.decoding import Decoding, Settings, advance, decode, row_keys, start
from stepprune_jax.generation.prefix import Prefix, policy_selector, prepare
from stepprune_jax.generation.request import Request, question_ids, read_request
from stepprune_jax.generation.sampling import nucleus, sample
from stepprune_jax.generation.text import TextStream, answer_text

__all__ = [
    "Answer",
    "Decoding",
    "Prefix",
    "Request",
    "Settings",
    "TextStream",
    "advance",
    "answer_text",
    "decode",
    "generate",
    "nucleus",
    "policy_selector",
    "prepare",
    "question_ids",
    "read_request",
    "row_keys",
    "sample",
    "start",
    "stream",
]
