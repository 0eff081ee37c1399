"""A tiny LLaVA as ours and as the torch model of `transformers`, and questions to ask it."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from PIL import Image

from stepprune_jax import testing
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference import (
    Answer,
    RunOptions,
    Sampling,
    generate,
    programs,
    read_request,
    trace_arrays,
)
from stepprune_jax.inference.base import Plan
from stepprune_jax.inference.plan import make_pairs, plan_pairs
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.pruning.packing import take

torch.set_num_threads(1)

SAID = "What is in this picture? Is the red dog in a chat? No, two: yes, the helpful user."


class Pair(NamedTuple):
    ours: VLM
    theirs: transformers.LlavaForConditionalGeneration


def pair(folder, **fields):
    """Both models on the same folder, in float32."""
    return load_pair(testing.tiny_llava(folder, **fields))


def load_pair(folder):
    """Both models on a folder, as each of them reads it."""
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    return Pair(load_vlm(folder, dtype=jnp.float32, progress=False), theirs.eval())


def random_image(seed):
    random = np.random.default_rng(seed)
    width, height = random.integers(5, 60, 2)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def question(random):
    words = SAID.split()
    return " ".join(random.choice(words, random.integers(1, 12)))


def ask(count, seed=0):
    """Questions with no, one or two images."""
    random = np.random.default_rng(seed)
    prompts = [question(random) for _ in range(count)]
    images = [
        [random_image(100 * seed + 2 * i + j) for j in range((i + 2) % 3)] for i in range(count)
    ]
    return prompts, images


def request(model, prompt, images):
    return read_request(model, [prompt], [images])


def pruner_inputs(model, pruner, prompts, images):
    """Inputs of a pruner for encoded images, a row for each pair of image and prompt."""
    pairs = make_pairs(model, pruner, prompts, images, plan_pairs(model, pruner, prompts, images))
    run = jax.jit(programs.make_pruner_inputs, static_argnames=("backbone", "plan"))
    return run(model.params, model.backbone, pairs, plan=Plan(is_projected=pruner.after_projector))


class Asked(NamedTuple):
    """A question, our answer, and the arrays of its trace."""

    prompt: str
    images: list[Image.Image]
    answer: Answer
    arrays: dict[str, np.ndarray]


def traced(pair, questions, method, max_tokens, positions="own"):
    """Our answers to the result of `ask`."""
    results, (prompts, images) = [], questions
    options = RunOptions(max_tokens, positions)
    options_of_run = {
        "sampling": Sampling(stop_ids=()),
        "options": options,
        "trace": results.append,
    }
    answers = generate(pair.ours, prompts, images, method, **options_of_run)
    arrays = [trace_arrays(results[0], row) for row in range(len(prompts))]
    return list(map(Asked, prompts, images, answers, arrays))


@torch.no_grad()
def reference_answer(pair, prompt, images, max_tokens, **options):
    """New ids of the reference's own generation, the stop id included."""
    ours, theirs = pair
    read = request(ours, prompt, images)
    n, token = ours.config.max_image_tokens, theirs.config.image_token_index
    ids = [t for x in read.ids[0] for t in ([token] * n if x == IMAGE_TOKEN else [x])]
    ids = torch.tensor([ids])
    pixels = {}
    if images:
        pixels["pixel_values"] = torch.tensor(ours.backbone.normalise(read.images.pixels))
    generated = theirs.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **pixels,
        max_new_tokens=max_tokens,
        do_sample=False,
        **options,
    )
    return tuple(generated[0, ids.shape[1] :].tolist())


@dataclasses.dataclass(frozen=True)
class ByQuestion(Pruner):
    """Keeps a number of tokens of each image that depends on the question, down to none."""

    budget: Budget = dataclasses.field(default_factory=lambda: Budget("adaptive"))

    name = "by question"
    budgets: ClassVar[tuple[str, ...]] = ("adaptive",)
    reads_text: ClassVar[bool] = True

    def keep(self, inputs, capacity):
        n, num_words = inputs.tokens.shape[1], inputs.text_valid.sum(1)
        order = (7 * jnp.arange(n) + num_words[:, None]) % n
        return take(inputs.tokens, order, num_words % (n - 1), capacity)


def chosen(n, question_length):
    """Indices of what `ByQuestion` keeps."""
    return sorted((7 * i + question_length) % n for i in range(question_length % (n - 1)))
