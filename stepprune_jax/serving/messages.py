"""Requests of OpenAI's chat interface, read strictly: all that enters the server is checked here.

A message's images stand in front of its text, as in the data that LLaVA was trained on.
"""

import base64
import binascii
import dataclasses
import functools
import io
import json
import re
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.images import open_image
from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.inference.answer import check_run
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.pipeline import place_method
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.models.stack import Execution
from stepprune_jax.pruning import Budget, Method, Policy, make_method
from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import nearest, one_line

# What is read of an image, from an untrusted sender.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA = re.compile(r"data:image/[\w.+-]+;base64")
_METHODS = 64  # methods that are kept, of those that requests have asked for
_LONGEST_TOKEN = 32  # characters; a longer text cannot fit, and need not be tokenised
_ROLES = ("user", "assistant")


class RequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status.
        message: what is wrong, in one line.
        field: the field of the request that it is about, or None.
    """

    def __init__(self, status: int, message: str, field: str | None = None):
        super().__init__(message)
        self.status, self.message, self.field = status, one_line(message), field


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What a request that does not say otherwise gets; see `make_method` and `RunOptions`.

    Attributes:
        pruner: name of the method; None for that of the policy, or none.
        policy: the policy of trained methods; a request cannot name one.
        budget: tokens to keep of each image.
        positions: position ids of kept tokens.
        max_tokens: longest answer.
    """

    pruner: str | None = None
    policy: Policy | None = None
    budget: Budget | str | None = None
    positions: str = "own"
    max_tokens: int = 128


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may cost before it is answered.

    Attributes:
        bytes: of its body, and of an image file.
        pixels: of an image.
        images: in all its messages.
        folder: images may also be files below it; None for data URLs alone.
    """

    bytes: int = 16 << 20
    pixels: int = 50_000_000
    images: int = 8
    folder: Path | None = None


class Chat(NamedTuple):
    """A request, read.

    Attributes:
        request: the prompt and its images, before the tower.
        method: how visual tokens are pruned.
        sampling: how tokens are drawn.
        seeded: whether the request has a seed.
        options: the longest answer, and how the model is run.
        stream: whether the answer is sent piece by piece.
        usage: whether a stream ends with its usage.
        ids: whether the answer has its token ids, too.
    """

    request: Request
    method: Method
    sampling: Sampling
    seeded: bool
    options: RunOptions
    stream: bool
    usage: bool
    ids: bool


_COUNT = (is_count, "an integer from 1")
_FLAG = (lambda x: isinstance(x, bool), "true or false")
_NUMBER = (is_number, "a number")
_TEXT = (lambda x: isinstance(x, str), "a text")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": _TEXT,
    "messages": (lambda x: isinstance(x, list) and len(x) > 0, "a list of messages"),
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "seed": (lambda x: is_count(x, 0) and x < 1 << 32, "an integer from 0, below 2**32"),
    "n": (lambda x: type(x) is int and x == 1, "1"),
    "stream": _FLAG,
    "stream_options": (
        lambda x: isinstance(x, dict) and {*x} <= {"include_usage"},
        "include_usage",
    ),
    "return_token_ids": _FLAG,
    "pruner": _TEXT,
    "budget": (lambda x: isinstance(x, str) or is_count(x), "a count, or a text such as 1/3"),
    "mean_budget": _NUMBER,
    "positions": _TEXT,
}


class Reader:
    """Reads requests for one model; may be used by several threads."""

    def __init__(
        self,
        model: VLM,
        name: str,
        defaults: Defaults,
        limits: Limits,
        *,
        engine: bool,
        execution: Execution = Execution(),
    ):
        """Checks the defaults.

        Args:
            model: the model.
            name: what requests call it.
            defaults: what they get if they do not say otherwise.
            limits: what they may cost.
            engine: whether the language model runs elsewhere.
            execution: how the model's layers are run.

        Raises:
            ValueError: a bad default, or one that an engine cannot serve.
        """
        self._model, self._name, self._engine = model, name, engine
        self._defaults, self._limits, self._execution = defaults, limits, execution
        self._method = functools.lru_cache(_METHODS)(self._make_method)
        self._weights = place_method(model, make_method(policy=defaults.policy)).params
        try:
            self._checked({})
        except RequestError as error:
            raise ValueError(f"--{error.message}") from error

    def read(self, body: bytes) -> Chat:
        """Reads a request.

        Args:
            body: a JSON object.

        Returns:
            The request.

        Raises:
            RequestError: a field is missing, unknown or has a bad value; the message names it.
        """
        fields = _parse(body)
        for name, value in fields.items():
            if name not in _FIELDS:
                hint = nearest(name, _FIELDS)
                raise RequestError(400, f"{name!r} is not supported.{hint}", name)
            fits, expected = _FIELDS[name]
            if not fits(value):
                raise RequestError(400, f"{name} is {_shown(value)}, expected {expected}", name)
        for name in ("model", "messages"):
            if name not in fields:
                raise RequestError(400, f"{name} is missing", name)
        if fields["model"] != self._name:
            message = f"model is {_shown(fields['model'])}, expected {self._name!r}"
            raise RequestError(404, message, "model")
        method, sampling, options = self._checked(fields)
        turns, images = self._turns(fields["messages"])
        try:
            request = read_request(self._model, [turns], [images])
        except ValueError as error:
            raise RequestError(400, str(error), "messages") from error
        self._check_length(request, method)
        return Chat(
            request,
            method,
            sampling,
            "seed" in fields,
            options,
            fields.get("stream", False),
            bool(fields.get("stream_options", {}).get("include_usage")),
            fields.get("return_token_ids", False),
        )

    def _checked(self, fields: dict[str, Any]) -> tuple[Method, Sampling, RunOptions]:
        """Returns method, sampling and options, checked together."""
        defaults, heat = self._defaults, fields.get("temperature", 0.0)
        names = ("budget", "mean_budget")
        if all(name in fields for name in names):
            raise RequestError(400, "budget and mean_budget are given, expected one", "budget")
        most = fields.get("max_completion_tokens", fields.get("max_tokens", defaults.max_tokens))
        # A request is never answered with what another one was told to draw.
        seed = fields.get("seed", secrets.randbelow(1 << 32) if heat else 0)
        sampling = Sampling(seed, heat, fields.get("top_p", 1.0))
        options = RunOptions(
            most, fields.get("positions", defaults.positions), None, self._execution, warm_up=False
        )
        try:
            if {"pruner", *names} & {*fields}:
                budget = fields.get("budget")
                if "mean_budget" in fields:
                    budget = Budget("mean", fields["mean_budget"])
                method = self._method(fields.get("pruner", defaults.pruner), budget)
            else:
                method = self._method(defaults.pruner, defaults.budget)
            if self._engine:
                self._check_engine(method, options)
            check_run(self._model.config, method, sampling, options)
        except ValueError as error:
            named = (name for name in _FIELDS if f"{name} is " in str(error))
            raise RequestError(400, str(error), next(named, "pruner")) from error
        return method, sampling, options

    def _make_method(self, name: str | None, budget: Budget | str | int | None) -> Method:
        """Builds a method; all that are trained share the weights on the devices."""
        policy = self._defaults.policy
        if policy is not None and name not in (None, policy.method):
            policy = None
        method = make_method(name, budget, policy=policy)
        if policy is None:
            return method
        return method._replace(params=self._weights._replace(stop_bias=method.params.stop_bias))

    def _check_engine(self, method: Method, options: RunOptions) -> None:
        """Raises for what an engine, which is given embeddings, cannot do."""
        pruner, config = method.pruner, self._model.config
        if pruner.cuts(config, config.max_image_tokens):
            message = (
                f"pruner is {pruner.name!r}, which drops tokens inside the language model; with an "
                "engine expected one that chooses before it"
            )
            raise RequestError(400, message, "pruner")
        if options.positions != "compact":
            message = (
                f"positions is {options.positions!r}, expected 'compact': an engine numbers the "
                "embeddings that it is given 0, 1, 2, ..."
            )
            raise RequestError(400, message, "positions")

    def _check_length(self, request: Request, method: Method) -> None:
        """Raises if a prompt might have to be truncated."""
        limit, visual = self._model.config.family.CONTEXT_LIMIT, 0
        for row in request.image_of[0]:
            size = int(request.images.sizes[row])
            entering = method.pruner.entering(size)
            visual += method.pruner.most(size) if entering is None else entering
        text = len(request.ids[0]) - len(request.image_of[0])
        if text + visual > limit:
            message = f"messages have {text} text tokens and up to {visual} visual tokens"
            raise RequestError(400, f"{message}, expected at most {limit} together", "messages")

    def _turns(self, messages: list[Any]) -> tuple[list[str], list[Image.Image]]:
        """Returns the text of each message, with marks for its images, and all images."""
        turns, images, characters = [], [], 0
        most = _LONGEST_TOKEN * self._model.config.family.CONTEXT_LIMIT
        for number, message in enumerate(messages):
            where, role = f"messages[{number}]", _ROLES[number % 2]
            fields = _object(message, where, ("role", "content"))
            if fields.get("role") != role:
                given = _shown(fields.get("role"))
                message = f"{where}.role is {given}, expected {role!r}: user and assistant in turn"
                raise RequestError(400, f"{message}, without a system prompt", "messages")
            content = fields.get("content")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not isinstance(parts, list):
                raise RequestError(400, f"{where}.content is missing", "messages")
            texts, shown = [], 0
            for place, part in enumerate(parts):
                at = f"{where}.content[{place}]"
                part = _object(part, at, ("type", "text", "image_url"))
                if part.get("type") == "text" and isinstance(part.get("text"), str):
                    texts.append(part["text"])
                elif part.get("type") == "image_url" and role == "user":
                    if len(images) == self._limits.images:
                        message = f"{at} is one image too many, expected {len(images)} at most"
                        raise RequestError(400, message, "messages")
                    images.append(self._image(part.get("image_url"), f"{at}.image_url"))
                    shown += 1
                else:
                    expected = "expected a text, or an image_url of the user"
                    raise RequestError(400, f"{at} is {_shown(part)}, {expected}", "messages")
            text = "\n".join(texts)
            characters += len(text)
            if characters > most:
                message = f"{where} brings the text above {most} characters, more than fits"
                raise RequestError(413, message, "messages")
            if IMAGE_MARK in text:
                message = f"{where} has {IMAGE_MARK} in its text, which stands for an image"
                raise RequestError(400, message, "messages")
            family = self._model.config.family
            turns.append(family.place_images(text, shown) if shown else text)
        return turns, images

    def _image(self, given: Any, where: str) -> Image.Image:
        """Decodes an image."""
        url = _object(given, where, ("url", "detail")).get("url")
        head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
        folder = self._limits.folder
        if _DATA.fullmatch(head):
            try:
                content = base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise RequestError(
                    400, f"{where}.url is not base64: {error}", "messages"
                ) from error
        elif folder is not None and head.startswith("file://"):
            content = self._file(folder, url.removeprefix("file://"), where)
        else:
            known = "data:image/png;base64,..." + " or file://NAME" * (folder is not None)
            message = f"{where}.url is {_shown(url)}, expected {known}; addresses are not fetched"
            raise RequestError(400, message, "messages")
        try:
            with warnings.catch_warnings():  # Pillow's own limit is another one
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(io.BytesIO(content), formats=FORMATS)
            large = image.width * image.height > self._limits.pixels
        except Image.DecompressionBombError:
            large = True
        except Exception as error:  # Pillow's decoders may raise any kind
            message = f"{where} is not an intact image of {', '.join(FORMATS)}"
            raise RequestError(400, message, "messages") from error
        if large:
            message = f"{where} has more than {self._limits.pixels} pixels"
            raise RequestError(413, message, "messages")
        try:
            return open_image(image)
        except ValueError as error:
            message = str(error).removeprefix(repr(image))
            raise RequestError(400, f"{where}{message}", "messages") from error

    def _file(self, folder: Path, name: str, where: str) -> bytes:
        """Reads a file below the folder, whatever links lead to it."""
        try:
            path = (folder / name).resolve()
            inside = path.is_relative_to(folder.resolve()) and path.is_file()
            if inside and path.stat().st_size <= self._limits.bytes:
                return path.read_bytes()
        except (OSError, ValueError):
            inside = False
        if not inside:
            message = f"{where}.url is {_shown(name)}, which is no file below the images' folder"
            raise RequestError(400, message, "messages")
        message = f"{where}.url is a file of more than {self._limits.bytes} bytes"
        raise RequestError(413, message, "messages")


def _parse(body: bytes) -> dict[str, Any]:
    """Reads a JSON object; fields that are null are as good as absent."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        fields = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    return _object(fields, "the body")


def _object(value: Any, where: str, known: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Returns the fields of an object that are not null."""
    if not isinstance(value, dict):
        message = f"{where} is {_shown(value)}, expected an object"
        raise RequestError(400, message, where.partition("[")[0] if "[" in where else None)
    fields = {name: field for name, field in value.items() if field is not None}
    for name in fields:
        if known is not None and name not in known:
            message = f"{where} has {_shown(name)}, expected only {', '.join(known)}"
            raise RequestError(400, message, "messages")
    return fields


def _shown(value: Any) -> str:
    """Returns a value from outside for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
