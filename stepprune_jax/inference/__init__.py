"""From a loaded model, prompts and pictures to answers; `python -m` of it is the command.

The pieces compose: `read_request` (host), `prepare` (tower, pruning, assembly), `start`, `advance`
and `decode` (the language model), `sample`. `generate` and `stream` do all of it.
"""

from stepprune_jax.inference.answer import Answer, generate, stream
from stepprune_jax.inference.decoding import Decoding, Settings, advance, decode, row_keys, start
from stepprune_jax.inference.prefix import Prefix, policy_selector, prepare
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.inference.sampling import nucleus, sample
from stepprune_jax.inference.text import TextStream, answer_text

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
    "read_request",
    "row_keys",
    "sample",
    "start",
    "stream",
]
