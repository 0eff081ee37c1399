"""From a loaded model, prompts and images to answers.

`generate` and `stream` do all of it; `pipeline` has the pieces and answers whole sets of prompts.
"""

from stepprune_jax.inference.answer import Answer, Options, generate, stream, trace_arrays
from stepprune_jax.inference.decoding import Decoding, Sampling, Trace, advance, decode, row_keys
from stepprune_jax.inference.pipeline import Prompts, RunOptions, Vision, answer_all, rank_all
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.inference.sampling import nucleus, sample
from stepprune_jax.inference.text import TextStream, answer_text

__all__ = [
    "Answer",
    "Decoding",
    "Options",
    "Prompts",
    "Request",
    "RunOptions",
    "Sampling",
    "TextStream",
    "Trace",
    "Vision",
    "advance",
    "answer_all",
    "answer_text",
    "decode",
    "generate",
    "nucleus",
    "rank_all",
    "read_request",
    "row_keys",
    "sample",
    "stream",
    "trace_arrays",
]
