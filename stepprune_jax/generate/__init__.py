"""From a loaded model, prompts and pictures to answers; `python -m` of it is the command.

The pieces compose: `read_request` (host), `prepare` (tower, pruning, assembly), `start`, `advance`
and `decode` (the language model), `sample`. `generate` and `stream` do all of it.
"""

from stepprune_jax.generate.answer import Answer, generate, stream
from stepprune_jax.generate.decoding import Decoding, Settings, advance, decode, row_keys, start
from stepprune_jax.generate.prefix import Prefix, policy_selector, prepare
from stepprune_jax.generate.request import Request, read_request
from stepprune_jax.generate.sampling import nucleus, sample
from stepprune_jax.generate.text import TextStream, answer_text

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
