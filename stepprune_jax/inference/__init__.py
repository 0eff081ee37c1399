"""From a loaded model, prompts and images to answers.

`Generator` answers requests; `generate` and `stream` are shorthands. `plan` plans a batch on the
host, `pipeline` has the stages of a batch, `programs` the compiled programs, `dataset` answers data
sets, and `text` turns ids into text. The types are in `base`.
"""

from stepprune_jax.data.videos import Video
from stepprune_jax.inference.base import Decoding, Images, Prompts, RunOptions, Trace
from stepprune_jax.inference.dataset import Answers, Batching
from stepprune_jax.inference.decoding import NotFiniteError, decode
from stepprune_jax.inference.encode import EncodedQuestions, encode_questions
from stepprune_jax.inference.generate import (
    Answer,
    Generator,
    generate,
    kept_per_patch,
    stream,
    trace_arrays,
)
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.inference.sampling import Sampling, greedy, nucleus, sample
from stepprune_jax.inference.text import TextStream, answer_text, stream_text

__all__ = [
    "Answer",
    "Answers",
    "Batching",
    "Decoding",
    "EncodedQuestions",
    "Generator",
    "Images",
    "NotFiniteError",
    "Prompts",
    "Request",
    "RunOptions",
    "Sampling",
    "TextStream",
    "Trace",
    "Video",
    "answer_text",
    "decode",
    "encode_questions",
    "generate",
    "greedy",
    "kept_per_patch",
    "nucleus",
    "read_request",
    "sample",
    "stream",
    "stream_text",
    "trace_arrays",
]
