"""Requests of OpenAI's chat interface, read strictly: all that enters the server is checked here.

A message's images stand in front of its text, as in the data that LLaVA was trained on.
"""

import dataclasses
import functools
import json
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.data.special_tokens import QuotingTokenizer, as_sent
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.generate import check_run
from stepprune_jax.inference.pipeline import place_pruner
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.stack import Execution
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.serving.errors import RequestError, refuse_unless, shown
from stepprune_jax.serving.fields import BODY, ENGINE, IMAGE_URL, MESSAGE, PART, read_fields
from stepprune_jax.serving.images import RequestLimits, read_image
from stepprune_jax.user_input import UserError, require

_PRUNERS = 64  # The most pruners that are kept for later requests.
_LONGEST_TOKEN = 32  # characters; a longer text cannot fit, and need not be tokenised
_ROLES = ("user", "assistant")
_SYSTEM = ("system", "developer")
_PARTS = ("text", "image_url")
# What an engine gets as it was sent.
_PASSED = ("seed", "stop", *ENGINE)


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What a request that does not say otherwise gets; see `build_pruner` and `RunOptions`.

    Attributes:
        pruner: name of the method; None for that of the policy, or none.
        policy: the policy of trained methods; a request cannot name one.
        budget: tokens to keep of each image.
        positions: position ids of kept tokens.
        max_tokens: longest answer.
        execution: how the model's layers are run.
    """

    pruner: str | None = None
    policy: TrainedPruner | None = None
    budget: Budget | str | None = None
    positions: str = "own"
    max_tokens: int = 128
    execution: Execution = Execution()


def check_defaults(config: ModelConfig, defaults: Defaults, *, engine: bool) -> None:
    """Checks what requests get by default, before the weights of the model are loaded.

    Args:
        config: the model's configuration.
        defaults: the defaults.
        engine: whether the language model runs elsewhere.

    Raises:
        UserError: a bad default, or one that an engine cannot serve.
    """
    options = RunOptions(defaults.max_tokens, defaults.positions, None, defaults.execution)
    pruner = _build(defaults.pruner, defaults.budget, defaults.policy)
    _check(config, pruner, Sampling(), options, engine=engine)


def _build(
    name: str | None, budget: Budget | str | int | None, policy: TrainedPruner | None
) -> Pruner:
    """Builds a pruner, with a policy unless another method is named."""
    if policy is not None and name not in (None, policy.name):
        policy = None
    return build_pruner(name, budget, policy=policy)


def _check(
    config: ModelConfig, pruner: Pruner, sampling: Sampling, options: RunOptions, *, engine: bool
) -> None:
    """Raises a UserError for what a model, or an engine that is given embeddings, cannot do."""
    cuts = engine and pruner.cuts(config, config.max_image_tokens)
    message = f"pruner is {pruner.name!r}, which drops tokens inside the language model; "
    require(not cuts, f"{message}with an engine, expected one that chooses before it")
    compact = f"positions is {options.positions!r}, expected 'compact' with an engine, which "
    compact += "numbers the embeddings that it is given"
    require(not engine or options.positions == "compact", compact)
    check_run(config, pruner, sampling, options)


class ChatRequest(NamedTuple):
    """A request, read.

    Attributes:
        request: the prompt and its images, before the tower.
        pruner: how visual tokens are pruned.
        sampling: how tokens are drawn.
        options: the longest answer, and how the model is run.
        passed: fields that an engine gets as they were sent.
        stop: texts that end the answer, and are no part of it.
        stream: whether the answer is sent piece by piece.
        usage: whether a stream ends with its usage.
        with_ids: whether the answer has its token ids, too.
    """

    request: Request
    pruner: Pruner
    sampling: Sampling
    options: RunOptions
    passed: Mapping[str, Any] = MappingProxyType({})
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    with_ids: bool = False

    @property
    def num_images(self) -> int:
        """Number of images of all messages."""
        return len(self.request.image_of[0])


class RequestParser:
    """Reads requests for one model; may be used by several threads.

    Attributes:
        model: the model.
        name: what requests call it.
        limits: what they may cost.
    """

    def __init__(
        self,
        model: VLM,
        name: str,
        defaults: Defaults,
        limits: RequestLimits,
        *,
        engine: bool,
        allow_special_tokens: bool = False,
    ):
        """Checks the defaults.

        Args:
            model: the model.
            name: what requests call it.
            defaults: what they get if they do not say otherwise.
            limits: what they may cost.
            engine: whether the language model runs elsewhere.
            allow_special_tokens: whether special tokens in a request's text, such as <|im_end|>,
                act as in the template, instead of being plain text.

        Raises:
            UserError: as `check_defaults`.
        """
        self.model, self.name, self.limits = model, name, limits
        self._defaults, self._engine = defaults, engine
        self._rules = BODY | ENGINE if engine else BODY
        self._quote, self._quoting_model = str, model
        if not allow_special_tokens:
            tokenizer = QuotingTokenizer(model.tokenizer)
            self._quote, self._quoting_model = tokenizer.quote, model._replace(tokenizer=tokenizer)
        self._pruner = functools.lru_cache(_PRUNERS)(self._build_pruner)
        check_defaults(model.config, defaults, engine=engine)
        # All requests share the weights on the devices.
        policy = defaults.policy
        self._policy = None if policy is None else place_pruner(model, policy)

    def read(self, body: bytes) -> ChatRequest:
        """Reads a request.

        Args:
            body: a JSON object.

        Returns:
            The request.

        Raises:
            RequestError: a field is missing, unknown or has a bad value; the message names it.
        """
        try:
            fields = json.loads(body, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not JSON: {error}") from error
        fields = read_fields(fields, "", self._rules)
        for name in ("model", "messages"):
            refuse_unless(name in fields, name, f"{name} is missing")
        self.check_name(fields["model"])
        pruner, sampling, options = self._how(fields)
        system, turns, images = self._turns(fields["messages"])
        try:
            request = read_request(self._quoting_model, [turns], [images], system=system)
        except UserError as error:
            raise RequestError(400, as_sent(str(error)), "messages") from error
        self._check_length(request, pruner)
        usage = fields.get("stream_options", {}).get("include_usage") is True
        stream, with_ids = (fields.get(x, False) for x in ("stream", "return_token_ids"))
        passed = {name: fields[name] for name in _PASSED if name in fields}
        stop = fields.get("stop", ())
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        return ChatRequest(
            request, pruner, sampling, options, passed, stop, stream, usage, with_ids
        )

    def usual(self, *, is_sampled: bool) -> tuple[Pruner, Sampling, RunOptions]:
        """Returns how requests are answered that have no fields for it, or only a temperature."""
        return self._how({"temperature": 1.0, "seed": 0} if is_sampled else {})

    def check_name(self, name: str) -> None:
        """Raises a RequestError if a model is not the one that is served."""
        message = f"model is {shown(name)}, expected {self.name!r}"
        refuse_unless(name == self.name, "model", message, 404)

    def _how(self, fields: dict[str, Any]) -> tuple[Pruner, Sampling, RunOptions]:
        """Returns pruner, sampling and options, checked together."""
        defaults, heat = self._defaults, fields.get("temperature", 0.0)
        both = "budget" in fields and "mean_budget" in fields
        refuse_unless(not both, "budget", "budget and mean_budget are given, expected one of them")
        most = fields.get("max_completion_tokens", fields.get("max_tokens", defaults.max_tokens))
        # Without a seed, two answers to one question differ.
        seed = fields.get("seed", secrets.randbelow(1 << 32) if heat else 0)
        sampling = Sampling(seed, heat, fields.get("top_p", 1.0))
        positions = fields.get("positions", defaults.positions)
        options = RunOptions(most, positions, None, defaults.execution)
        asked = {"pruner", "budget", "mean_budget"} & {*fields}
        budget = fields.get("budget") if asked else defaults.budget
        try:
            if "mean_budget" in fields:
                budget = Budget("mean", fields["mean_budget"])
            pruner = self._pruner(fields.get("pruner", defaults.pruner), budget)
            _check(self.model.config, pruner, sampling, options, engine=self._engine)
        except UserError as error:
            named = next((name for name in BODY if f"{name} is " in str(error)), "pruner")
            other = {"budget": "mean_budget", "max_tokens": "max_completion_tokens"}.get(named)
            named = other if other in fields else named
            raise RequestError(400, str(error), named) from error
        return pruner, sampling, options

    def _build_pruner(self, name: str | None, budget: Budget | str | int | None) -> Pruner:
        """Builds a pruner, with the policy of the server unless another method is named."""
        return _build(name, budget, self._policy)

    def _check_length(self, request: Request, pruner: Pruner) -> None:
        """Raises if a prompt might have to be truncated."""
        limit, visual = self.model.backbone.CONTEXT_LIMIT, 0
        for row in request.image_of[0]:
            size = int(request.images.sizes[row])
            visual += pruner.schedule(self.model.config, size).bound
        text = len(request.ids[0]) - len(request.image_of[0])
        message = f"messages have {text} text tokens and up to {visual} visual tokens"
        message += f", expected at most {limit} together"
        refuse_unless(text + visual <= limit, "messages", message)

    def _turns(self, messages: list[Any]) -> tuple[str | None, list[str], list[Image.Image]]:
        """Returns the quoted texts of the system and of each turn, and the images of the turns.

        A text has marks of its images if a later turn than the first one has images.

        Raises:
            RequestError: a message is not of the role whose turn it is, or has a bad part.
        """
        system, turns, counts, images = None, [], [], []
        backbone, characters = self.model.backbone, 0
        most = _LONGEST_TOKEN * backbone.CONTEXT_LIMIT
        for number, message in enumerate(messages):
            where, expected = f"messages[{number}]", _ROLES[len(turns) % 2]
            fields = read_fields(message, where, MESSAGE)
            role = fields.get("role")
            problem = f"{where}.role is {shown(role)}, expected {expected!r}: user and assistant "
            problem += "in turn, after what the system says"
            known = role == expected or (role in _SYSTEM and not turns)
            refuse_unless(known, "messages", problem)
            before = len(images)
            text = self._text(fields.get("content"), where, role, images)
            characters += len(text)
            problem = f"{where} brings the text above {most} characters, more than the model reads"
            refuse_unless(characters <= most, "messages", problem, 413)
            problem = f"{where} has {IMAGE_MARK} in its text, which stands for an image"
            refuse_unless(IMAGE_MARK not in text, "messages", problem)
            text = self._quote(text)
            if role in _SYSTEM:
                system = text if system is None else f"{system}\n{text}"
                continue
            turns.append(text)
            counts.append(len(images) - before)
        refuse_unless(len(turns) > 0, "messages", "messages has none of the user")
        if any(counts[1:]):  # otherwise `read_request` puts the marks in front of the first text
            turns = list(map(backbone.place_images, turns, counts))
        return system, turns, images

    def _text(self, content: Any, where: str, role: str, images: list[Image.Image]) -> str:
        """Returns the text of a message, and adds its images to the list."""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        refuse_unless(parts is not None, "messages", f"{where}.content is missing")
        texts = []
        for place, given in enumerate(parts):
            at = f"{where}.content[{place}]"
            kind = given.get("type") if isinstance(given, dict) else None
            # Before its fields, which other kinds of parts, such as a video, name otherwise.
            message = f"{at}.type is {shown(kind)}, expected 'text' or 'image_url'"
            refuse_unless(kind in (None, *_PARTS), "messages", message)
            part = read_fields(given, at, PART)
            if kind == "image_url" and role == "user":
                at = f"{at}.image_url"
                few = len(images) < self.limits.images
                refuse_unless(few, "messages", f"{at} is one more than {len(images)} images")
                url = read_fields(part.get("image_url"), at, IMAGE_URL).get("url")
                images.append(read_image(url, f"{at}.url", self.limits))
                continue
            fits = part.get("type") == "text" and "text" in part
            expected = "expected a text, or an image_url of the user"
            refuse_unless(fits, "messages", f"{at} is {shown(part)}, {expected}")
            texts.append(part["text"])
        return "\n".join(texts)


def _refuse(name: str) -> None:
    raise UserError(f"{name} is not a number of JSON")
