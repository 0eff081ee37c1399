"""Answers to another program's questions, by the code that answers our own benchmarks."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from PIL import Image

from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints import folder as folders
from stepprune_jax.checkpoints import load_vlm
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy, check_fits, load_policy
from stepprune_jax.data.images import open_image
from stepprune_jax.evaluation.answers import Answering, Selection, answer, cut_prompts
from stepprune_jax.evaluation.generate_stage import CHUNK, WIDTHS
from stepprune_jax.evaluation.methods import Method, make_row, random_orders
from stepprune_jax.evaluation.names import ALL, CLS, GRID, RANDOM
from stepprune_jax.evaluation.orders import trained_order
from stepprune_jax.evaluation.split import Encoded, encode_split
from stepprune_jax.inference.answer import Options, check_options
from stepprune_jax.parallel.placement import mesh_of, row_count
from stepprune_jax.parallel.sharding import build_mesh

POLICY = "policy"
# What a user may ask for, to the name of the row.
METHODS = {"all": ALL, "random": RANDOM, "grid": GRID, "cls": CLS}
DTYPES = ("bfloat16", "float32", "float16")


class Wanted(NamedTuple):
    """A question of another program.

    Attributes:
        text: the user's whole message; an image mark in it does not matter.
        image: the picture, or None.
        max_new_tokens: longest answer.
        until: strings that end the answer, which does not hold them.
    """

    text: str
    image: Image.Image | None
    max_new_tokens: int
    until: tuple[str, ...] = ()


class Answerer(NamedTuple):
    """A model and what it keeps of a picture.

    Attributes:
        model: the frozen model.
        method: the row of our tables that answers are those of.
        policy: who chooses, for a row with one.
        batch_size: questions at a time, on all devices.
        positions: position ids of kept tokens, "original" or "compact".
        attention: "matmul", "xla" or "cudnn".
        seed: of random tokens.
    """

    model: VLM
    method: Method
    policy: Policy | None
    batch_size: int
    positions: str
    attention: str
    seed: int


def load_answerer(
    pretrained: str | Path,
    *,
    policy: str | Path | None = None,
    method: str | None = None,
    budget: int | None = None,
    stop_bias: float | int | None = None,
    vision_folder: str | Path | None = None,
    dtype: str = "bfloat16",
    mesh: str = "single",
    batch_size: int = 1,
    positions: str = "original",
    attention: str = "matmul",
    seed: int = 0,
) -> Answerer:
    """Checks what is asked for, and then loads the model.

    Args:
        pretrained: checkpoint folder or hub id.
        policy: policy file.
        method: "policy" (the default with a policy), "all" (the default without), "random", "grid"
            or "cls".
        budget: exact number of tokens of a picture; without it a policy stops by itself.
        stop_bias: added to the policy's stop logits, in place of its own.
        vision_folder: CLIP folder of an original LLaVA-v1.5 checkpoint.
        dtype: of the model: "bfloat16", "float32" or "float16".
        mesh: preset of `build_mesh`.
        batch_size: questions that each device takes together.
        positions: position ids of kept tokens, "original" or "compact".
        attention: "matmul", "xla" or "cudnn".
        seed: of random tokens.

    Raises:
        FileNotFoundError: model or policy are not there.
        ValueError: an argument has a bad value, or does not go with another one.
    """
    method = method or (ALL if policy is None else POLICY)
    if method not in {*METHODS, POLICY, ALL}:
        raise ValueError(f"method is {method!r}, expected {POLICY} or one of {', '.join(METHODS)}")
    row = METHODS.get(method, method)
    if (policy is None) == (row == POLICY):
        raise ValueError(f"method {method!r} and policy {policy!r} do not go together")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected an integer from 1")
    source = folders.inspect_folder(pretrained, vision_folder)
    n = source.config.num_image_tokens
    chosen = None if policy is None else load_policy(policy)
    if chosen is not None:
        check_fits(chosen, source.config)
    elif stop_bias is not None:
        raise ValueError("a stop bias needs a policy")
    elif (row == ALL) != (budget is None):
        raise ValueError(f"budget is {budget}, expected {'none' if row == ALL else 'a count'}")
    elif budget is not None and not 1 <= budget <= n:
        raise ValueError(f"budget is {budget}, expected 1 to {n}, the model's visual tokens")
    given = {"policy": chosen} | ({} if chosen is None else {"budget": budget})
    check_options(
        source.config,
        Options(stop_bias=stop_bias, positions=positions, attention=attention, **given),
    )
    devices = None if mesh == "single" else build_mesh(mesh)
    model = load_vlm(pretrained, devices, jnp.dtype(dtype), vision_folder=vision_folder)
    adaptive = chosen is not None and budget is None
    bias = None
    if adaptive:
        bias = float(chosen.stop_bias if stop_bias is None else stop_bias)
    found = Method(row, "adaptive" if adaptive else "exact", budget, policy and POLICY, bias)
    size = batch_size * row_count(mesh_of(model.params))
    return Answerer(model, found, chosen, size, positions, attention, seed)


def answer_all(
    answerer: Answerer,
    wanted: Sequence[Wanted],
    report: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Answers questions greedily.

    Args:
        answerer: model and method.
        wanted: the questions; those with the same longest answer share batches.
        report: called with the number of questions done, chunk by chunk.

    Returns:
        An answer each.

    Raises:
        ValueError: a longest answer below 1, or a picture that cannot be read.
    """
    short = [w.max_new_tokens for w in wanted if w.max_new_tokens < 1]
    if short:
        raise ValueError(f"max_new_tokens is {short[0]}, expected an integer from 1")
    texts, done = [""] * len(wanted), 0
    for longest in sorted({w.max_new_tokens for w in wanted}):
        alike = [place for place, w in enumerate(wanted) if w.max_new_tokens == longest]
        size = max(1, CHUNK // answerer.batch_size) * answerer.batch_size
        for first in range(0, len(alike), size):
            places = alike[first : first + size]
            asked = [_asked(place, wanted[place]) for place in places]
            for place, text in zip(places, _answer_chunk(answerer, asked, longest), strict=True):
                texts[place] = cut_at(text, wanted[place].until)
            done += len(places)
            report(done)
    return texts


def _asked(number: int, wanted: Wanted) -> BenchmarkQuestion:
    """A question as the benchmarks have them; equal pictures go through the tower once."""
    image = None
    if wanted.image is not None:
        out = io.BytesIO()
        open_image(wanted.image).save(out, "PNG", compress_level=1)
        image = out.getvalue()
    return BenchmarkQuestion(number, wanted.text, wanted.text, image)


def _answer_chunk(
    answerer: Answerer, asked: Sequence[BenchmarkQuestion], longest: int
) -> list[str]:
    """Answers questions that share a pass through the tower."""
    model, method = answerer.model, answerer.method
    n, numbers = model.config.num_image_tokens, [question.question_id for question in asked]
    encoded = encode_split(
        model, asked, batch_size=answerer.batch_size, with_attention=method.name == CLS,
        attention=answerer.attention, sizes=WIDTHS,
    )  # fmt: skip
    encoded = cut_prompts(encoded, n, numbers)
    shown, plain = np.flatnonzero(encoded.has_image), np.flatnonzero(~encoded.has_image)
    nothing = Selection(np.zeros((len(plain), 1), np.int32), np.zeros(len(plain), np.int32))
    parts = [(plain, nothing, (n,))]
    if len(shown):
        chosen = _choose(answerer, encoded.take(shown), [numbers[row] for row in shown])
        parts.append((shown, chosen, tuple(sorted({chosen.order.shape[1], n}))))
    texts = [""] * len(asked)
    for rows, selection, ladder in parts:
        how = Answering(
            ladder, answerer.batch_size, longest, answerer.positions, answerer.attention, WIDTHS
        )
        if len(rows):
            found = answer(model, encoded.take(rows), selection, how)
            for row, text in zip(rows, found.texts, strict=True):
                texts[row] = text
    return texts


def _choose(answerer: Answerer, seen: Encoded, numbers: Sequence[int]) -> Selection:
    """What is kept of each picture."""
    model, method, policy = answerer.model, answerer.method, answerer.policy
    n, orders, policies = model.config.num_image_tokens, {}, {}
    if policy is not None:
        policies = {method.policy: policy}
        steps = method.budget or policy.config.steps(n)
        orders[method.policy] = trained_order(
            model, policy, seen, steps=steps, batch_size=answerer.batch_size
        )
    drawn = random_orders(answerer.seed, numbers, n)
    return make_row(method, seen, model.config, policies, orders, drawn).selection


def cut_at(text: str, until: Sequence[str]) -> str:
    """The answer up to the first of the strings that end it; empty ones do not count."""
    places = [text.find(end) for end in until if end and end in text]
    return text[: min(places)] if places else text
