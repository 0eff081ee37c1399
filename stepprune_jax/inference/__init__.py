"""From a loaded model, prompts and images to answers.

`generate` and `stream` do all of it; `pipeline` has the steps of a batch, `programs` the compiled
programs, and `sets` answers whole sets of prompts. All types are in `base`.
"""

from stepprune_jax.inference.answer import Answer, generate, stream, trace_arrays
from stepprune_jax.inference.base import Decoding, Images, Prompts, RunOptions, Trace
from stepprune_jax.inference.decoding import decode
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.inference.sampling import Sampling, greedy, nucleus, sample
from stepprune_jax.inference.sets import answer_all, rank_all
from stepprune_jax.inference.text import TextStream, answer_text

__all__ = [
    "Answer",
    "Decoding",
    "Images",
    "Prompts",
    "Request",
    "RunOptions",
    "Sampling",
    "TextStream",
    "Trace",
    "answer_all",
    "answer_text",
    "decode",
    "generate",
    "greedy",
    "nucleus",
    "rank_all",
    "read_request",
    "sample",
    "stream",
    "trace_arrays",
]
