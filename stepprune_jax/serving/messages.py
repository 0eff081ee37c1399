"""Parses requests of OpenAI's chat interface. Everything that enters the server is checked here.

The images and videos of a message precede its text, as in LLaVA's training data.
"""

import dataclasses
import functools
import json
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import IMAGE_MARK, IMAGE_TOKEN
from stepprune_jax.data.special_tokens import QuotingTokenizer, as_sent
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.generate import check_run
from stepprune_jax.inference.pipeline import place_pruner
from stepprune_jax.inference.plan import adapt_counts, check_videos
from stepprune_jax.inference.request import ImageLike, Request, read_request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.stack import Execution
from stepprune_jax.policy.buckets import bucket_ladder
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.serving.fields import (
    BODY,
    ENGINE,
    IMAGE_URL,
    MESSAGE,
    PART,
    VIDEO_URL,
    RequestError,
    messages_error,
    quote,
    read_fields,
)
from stepprune_jax.serving.images import RequestLimits, read_image
from stepprune_jax.serving.videos import VideoSampling, read_sampling, read_video
from stepprune_jax.user_input import UserError

# Number of pruners to keep for later requests. Requests name few combinations of method and budget.
# A client that tries many combinations must not fill the memory.
_CACHED_PRUNERS = 64
# Characters. A text with more characters per token than this cannot fit, and is not tokenized.
_MAX_TOKEN_LENGTH = 32
_ROLES = ("user", "assistant")
_SYSTEM_ROLES = ("system", "developer")
_PART_TYPES = ("text", "image_url", "video_url")
# Fields that an engine receives as the client sent them. In the engine's format, "logprobs" is a
# number.
_ENGINE_FIELDS = ("seed", "stop", *(name for name in ENGINE if "logprobs" not in name))


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Settings of requests that do not set them; see `build_pruner` and `RunOptions`.

    Attributes:
        pruner: name of the method; None selects the policy's method, or no pruning without one.
        policy: the policy of trained methods. A request cannot choose another policy.
        budget: number of tokens to keep of each image.
        positions: position ids of kept tokens.
        max_tokens: length limit of answers.
        execution: how the model's layers are run.
    """

    pruner: str | None = None
    policy: TrainedPruner | None = None
    budget: Budget | str | None = None
    positions: str = "own"
    max_tokens: int = 128
    execution: Execution = Execution()


def check_defaults(config: ModelConfig, defaults: Defaults, *, engine: bool) -> None:
    """Checks the default settings before the weights of the model are loaded.

    Args:
        config: configuration of the model.
        defaults: the default settings.
        engine: whether an engine runs the language model.

    Raises:
        UserError: a setting is invalid, or an engine cannot serve it.
    """
    options = RunOptions(defaults.max_tokens, defaults.positions, execution=defaults.execution)
    pruner = _build_pruner(defaults.pruner, defaults.budget, defaults.policy)
    _check_settings(config, pruner, Sampling(), options, engine=engine)


def budget_ladder(config: ModelConfig, defaults: Defaults) -> tuple[str, ...]:
    """Lists a budget for each padded number of tokens that requests can select.

    Args:
        config: configuration of the model.
        defaults: the default settings; the pruner limits the budgets.

    Raises:
        UserError: the pruner keeps no fixed number of tokens.
    """
    pruner = _build_pruner(defaults.pruner, 1, defaults.policy)
    largest_budget = pruner.schedule(config, config.max_image_tokens).most
    return tuple(str(size) for size in bucket_ladder(largest_budget))


def _build_pruner(
    name: str | None, budget: Budget | str | int | None, policy: TrainedPruner | None
) -> Pruner:
    """Builds a pruner from its settings.

    Args:
        name: name of the method; None selects the policy's method, or no pruning without a policy.
        budget: number of tokens to keep of each image; None selects the method's default.
        policy: the policy of the server, which methods with another name ignore.
    """
    if policy is not None and name not in (None, policy.name):
        policy = None
    return build_pruner(name, budget, policy=policy)


def _check_settings(
    config: ModelConfig, pruner: Pruner, sampling: Sampling, options: RunOptions, *, engine: bool
) -> None:
    """Checks that the model, and the engine if there is one, can serve the settings of a request.

    Args:
        config: configuration of the model.
        pruner: pruner of the request.
        sampling: how the answer's tokens are sampled.
        options: how the model is run.
        engine: whether an engine runs the language model.

    Raises:
        UserError: a setting cannot be served.
    """
    if engine and pruner.cuts(config, config.max_image_tokens):
        raise UserError(
            f"pruner is {pruner.name!r}, which drops tokens inside the language model; with an "
            "engine, expected a method that selects tokens before the language model"
        )
    if engine and options.positions != "compact":
        raise UserError(
            f"positions is {options.positions!r}, expected 'compact' with an engine, which numbers "
            "the embeddings itself"
        )
    check_run(config, pruner, sampling, options)


class ChatRequest(NamedTuple):
    """A parsed and checked request.

    Attributes:
        request: the tokenized prompt and its preprocessed images and videos.
        pruner: prunes the visual tokens.
        sampling: how the answer's tokens are sampled.
        options: the answer's length limit, and how the model is run.
        engine_fields: fields that an engine receives as the client sent them.
        stop_texts: texts that end the answer. The answer does not include them.
        is_streamed: whether the answer is sent token by token.
        has_usage: whether a streamed answer ends with its token counts.
        has_token_ids: whether the answer includes its token ids.
        has_kept_tokens: whether the answer includes the kept tokens of each image and video.
        num_choices: number of answers.
        num_top_logprobs: number of most probable tokens whose log-probabilities the answer includes
            at each position; None for an answer without log-probabilities.
    """

    request: Request
    pruner: Pruner
    sampling: Sampling
    options: RunOptions
    engine_fields: Mapping[str, Any] = MappingProxyType({})
    stop_texts: tuple[str, ...] = ()
    is_streamed: bool = False
    has_usage: bool = False
    has_token_ids: bool = False
    has_kept_tokens: bool = False
    num_choices: int = 1
    num_top_logprobs: int | None = None

    @property
    def num_images(self) -> int:
        """Number of images and videos in all messages."""
        return len(self.request.image_of[0])


class RequestParser:
    """Parses requests for one model. Thread-safe.

    Attributes:
        model: the model that answers.
        name: the model's name in requests.
        limits: limits of a request's size.
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
        """Checks the defaults and places the policy's weights on the devices.

        Args:
            model: the model that answers.
            name: the model's name in requests.
            defaults: settings of requests that do not set them.
            limits: limits of a request's size.
            engine: whether an engine runs the language model.
            allow_special_tokens: whether special tokens in a request's text, such as <|im_end|>,
                act as in the template. By default they are plain text.

        Raises:
            UserError: a default is invalid, or an engine cannot serve it.
        """
        self.model, self.name, self.limits = model, name, limits
        self._defaults, self._engine = defaults, engine
        self._body_rules = BODY | ENGINE if engine else BODY
        # Quoting turns special tokens of a text into plain text. `str` leaves a text unchanged.
        self._quote_tokens, self._quoting_model = str, model
        if not allow_special_tokens:
            tokenizer = QuotingTokenizer(model.tokenizer)
            self._quote_tokens = tokenizer.quote
            self._quoting_model = model._replace(tokenizer=tokenizer)
        check_defaults(model.config, defaults, engine=engine)
        # All requests share one copy of the policy's weights on the devices.
        policy = defaults.policy
        policy = None if policy is None else place_pruner(model, policy)

        @functools.lru_cache(_CACHED_PRUNERS)
        def cached_pruner(name: str | None, budget: Budget | str | int | None) -> Pruner:
            return _build_pruner(name, budget, policy)

        self._cached_pruner = cached_pruner

    def parse(self, body: bytes) -> ChatRequest:
        """Parses and checks the body of a request, and preprocesses its images and videos.

        Args:
            body: a JSON object with the fields of `fields.BODY`.

        Returns:
            The request with its settings, ready for a backend.

        Raises:
            RequestError: a field is missing, unknown or invalid. The message names the field.
        """
        try:
            fields = json.loads(body, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not JSON: {error}") from error
        fields = read_fields(fields, "", self._body_rules)
        for name in ("model", "messages"):
            if name not in fields:
                raise RequestError(400, f"{name} is missing", name)
        self.check_model_name(fields["model"])
        pruner, sampling, options = self._read_settings(fields)
        sampling_of_videos = read_sampling(fields)
        system_prompt, turns, images = self._read_messages(fields["messages"], sampling_of_videos)
        try:
            request = read_request(self._quoting_model, [turns], [images], system=system_prompt)
        except UserError as error:
            raise messages_error(as_sent(str(error))) from error
        try:
            check_videos(pruner, request.images)
        except UserError as error:
            raise RequestError(400, str(error), "pruner") from error
        self._check_prompt_length(request, pruner)
        stop_field, num_top_logprobs = fields.get("stop", ()), _read_logprobs(fields)
        engine_fields = {name: fields[name] for name in _ENGINE_FIELDS if name in fields}
        if num_top_logprobs is not None:
            engine_fields["logprobs"] = num_top_logprobs
        return ChatRequest(
            request,
            pruner,
            sampling,
            options,
            engine_fields=engine_fields,
            stop_texts=(stop_field,) if isinstance(stop_field, str) else tuple(stop_field),
            is_streamed=fields.get("stream", False),
            has_usage=fields.get("stream_options", {}).get("include_usage") is True,
            has_token_ids=fields.get("return_token_ids", False),
            has_kept_tokens=fields.get("return_kept_tokens", False),
            num_choices=fields.get("n", 1),
            num_top_logprobs=num_top_logprobs,
        )

    def default_settings(
        self, *, is_sampled: bool, budget: str | None = None
    ) -> tuple[Pruner, Sampling, RunOptions]:
        """Returns the settings of a request without other fields.

        Args:
            is_sampled: whether the request sets a temperature.
            budget: budget of the request; None for the server's budget.
        """
        fields: dict[str, Any] = {"temperature": 1.0, "seed": 0} if is_sampled else {}
        return self._read_settings(fields if budget is None else {**fields, "budget": budget})

    def check_model_name(self, name: str) -> None:
        """Raises a RequestError if `name` is not the model that is served."""
        if name != self.name:
            message = f"model is {quote(name)}, expected {self.name!r}"
            raise RequestError(404, message, "model")

    def _read_settings(self, fields: dict[str, Any]) -> tuple[Pruner, Sampling, RunOptions]:
        """Reads and checks the settings of a request.

        Args:
            fields: fields of the body. Absent fields have the server's defaults.

        Returns:
            The pruner, the sampling of the answer, and how the model is run.

        Raises:
            RequestError: a setting is invalid or cannot be served. The error names the field.
        """
        defaults, temperature = self._defaults, fields.get("temperature", 0.0)
        if "budget" in fields and "mean_budget" in fields:
            message = "budget and mean_budget are both set, expected only one of them"
            raise RequestError(400, message, "budget")
        max_tokens = fields.get("max_tokens", defaults.max_tokens)
        max_tokens = fields.get("max_completion_tokens", max_tokens)
        # A sampled request without a seed has a random seed, so its answers vary.
        seed = fields.get("seed", secrets.randbelow(1 << 32) if temperature else 0)
        sampling = Sampling(seed, temperature, fields.get("top_p", 1.0))
        positions = fields.get("positions", defaults.positions)
        options = RunOptions(max_tokens, positions, execution=defaults.execution)
        # The default budget belongs to the default pruner, so a request that sets one of these
        # fields does not use it.
        has_pruning_field = not {"pruner", "budget", "mean_budget"}.isdisjoint(fields)
        budget = fields.get("budget") if has_pruning_field else defaults.budget
        try:
            if "mean_budget" in fields:
                budget = Budget("mean", fields["mean_budget"])
            pruner = self._cached_pruner(fields.get("pruner", defaults.pruner), budget)
            _check_settings(self.model.config, pruner, sampling, options, engine=self._engine)
        except UserError as error:
            # Messages have the form "FIELD is VALUE, expected ...". Two fields have an alias.
            field = next((name for name in BODY if f"{name} is " in str(error)), "pruner")
            alias = {"budget": "mean_budget", "max_tokens": "max_completion_tokens"}.get(field)
            raise RequestError(400, str(error), alias if alias in fields else field) from error
        return pruner, sampling, options

    def _check_prompt_length(self, request: Request, pruner: Pruner) -> None:
        """Checks that a prompt fits into the model's context, however many tokens are pruned.

        Args:
            request: a request with one prompt.
            pruner: pruner of the request. Its `bound` is the largest number of kept tokens.

        Raises:
            RequestError: the prompt might exceed the context limit.
        """
        limit, max_visual, hint = self.model.backbone.CONTEXT_LIMIT, 0, ""
        if request.images is not None:
            rows = np.array(request.image_of[0], int)
            bounds = np.array(
                [
                    pruner.schedule(self.model.config, size).bound
                    for size in request.images.sizes[rows].tolist()
                ]
            )
            if pruner.budget.is_exact:
                bounds = adapt_counts(pruner, request.images, rows, bounds)
            max_visual = int(bounds.sum())
            if request.images.clips is not None:
                hint = "; sample fewer frames (media_io_kwargs) or keep fewer tokens (budget)"
        num_text = sum(token != IMAGE_TOKEN for token in request.ids[0])
        if num_text + max_visual > limit:
            raise messages_error(
                f"messages have {num_text} text tokens and up to {max_visual} visual tokens, "
                f"expected at most {limit} together{hint}"
            )

    def _read_messages(
        self, messages: list[Any], sampling: VideoSampling
    ) -> tuple[str | None, list[str], list[ImageLike]]:
        """Reads the messages of a conversation: system messages, then user and assistant in turn.

        Args:
            messages: value of the field `messages`.
            sampling: how the frames of videos are sampled.

        Returns:
            The system prompt or None, the text of each turn, and the images and videos of all
            turns. Special tokens in texts are quoted. If a turn after the first turn has images,
            all texts include an <image> mark for each image and video. Otherwise texts have no
            marks, and `read_request` puts them in front of the first text.

        Raises:
            RequestError: roles do not alternate, or a message has an invalid part.
        """
        system_prompt, turns, image_counts, images = None, [], [], []
        backbone, num_characters = self.model.backbone, 0
        max_characters = _MAX_TOKEN_LENGTH * backbone.CONTEXT_LIMIT
        for message_index, message in enumerate(messages):
            field_path, expected_role = f"messages[{message_index}]", _ROLES[len(turns) % 2]
            fields = read_fields(message, field_path, MESSAGE)
            role = fields.get("role")
            if role != expected_role and (role not in _SYSTEM_ROLES or turns):
                raise messages_error(
                    f"{field_path}.role is {quote(role)}, expected {expected_role!r}: user and "
                    "assistant alternate after the system messages"
                )
            text, message_images = self._read_content(
                fields.get("content"),
                field_path,
                is_user=role == "user",
                max_images=self.limits.images - len(images),
                sampling=sampling,
            )
            images += message_images
            num_characters += len(text)
            if num_characters > max_characters:
                raise messages_error(
                    f"{field_path} brings the text to {num_characters} characters, expected at "
                    f"most {max_characters} in all messages",
                    status=413,
                )
            if IMAGE_MARK in text:
                raise messages_error(
                    f"{field_path} has {IMAGE_MARK} in its text, which is reserved for images: "
                    "remove it"
                )
            text = self._quote_tokens(text)
            if role in _SYSTEM_ROLES:
                system_prompt = text if system_prompt is None else f"{system_prompt}\n{text}"
                continue
            turns.append(text)
            image_counts.append(len(message_images))
        if not turns:
            raise messages_error("messages has no user message, expected at least one")
        if any(image_counts[1:]):
            turns = list(map(backbone.place_images, turns, image_counts))
        return system_prompt, turns, images

    def _read_content(
        self,
        content: Any,
        field_path: str,
        *,
        is_user: bool,
        max_images: int,
        sampling: VideoSampling,
    ) -> tuple[str, list[ImageLike]]:
        """Reads the content of one message.

        Args:
            content: a text, or a list of parts of type text, image_url and video_url; None if it is
                missing.
            field_path: path of the message, such as "messages[0]", for error messages.
            is_user: whether a user wrote the message. Only users may send images and videos.
            max_images: largest number of images and videos in this message.
            sampling: how the frames of videos are sampled.

        Returns:
            The texts of all parts, joined by newlines; and the decoded images and the videos, in
            the order of their parts.

        Raises:
            RequestError: a part is invalid, or there are too many images.
        """
        if content is None:
            raise messages_error(f"{field_path}.content is missing")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts: list[str] = []
        images: list[ImageLike] = []
        for part_index, part in enumerate(parts):
            part_path = f"{field_path}.content[{part_index}]"
            part_type = part.get("type") if isinstance(part, dict) else None
            # The type is checked before the fields, because parts of an unsupported type, such as
            # audio, have unknown fields.
            if part_type not in (None, *_PART_TYPES):
                expected = "'text', 'image_url' or 'video_url'"
                message = f"{part_path}.type is {quote(part_type)}, expected {expected}"
                raise messages_error(message)
            fields = read_fields(part, part_path, PART)
            if part_type in ("image_url", "video_url") and is_user:
                image_path = f"{part_path}.{part_type}"
                if len(images) == max_images:
                    limit = self.limits.images
                    raise messages_error(
                        f"{image_path} is image {limit + 1}, expected at most {limit} images "
                        "and videos in all messages"
                    )
                images.append(self._read_image(part_type, fields, image_path, sampling))
            elif fields.get("type") == "text" and "text" in fields:
                texts.append(fields["text"])
            else:
                expected = "a text part, or an image_url or video_url part of a user message"
                raise messages_error(f"{part_path} is {quote(fields)}, expected {expected}")
        return "\n".join(texts), images

    def _read_image(
        self, part_type: str, fields: dict[str, Any], field_path: str, sampling: VideoSampling
    ) -> ImageLike:
        """Reads the image or the video of a part.

        Args:
            part_type: "image_url" or "video_url".
            fields: fields of the part.
            field_path: path of the part's image or video, for error messages.
            sampling: how the frames of videos are sampled.

        Raises:
            RequestError: the part is invalid, or the model reads no videos.
        """
        rules = IMAGE_URL if part_type == "image_url" else VIDEO_URL
        url = read_fields(fields.get(part_type), field_path, rules).get("url")
        if part_type == "image_url":
            return read_image(url, f"{field_path}.url", self.limits)
        backbone = self.model.backbone
        if not backbone.reads_videos:
            raise messages_error(f"{field_path} is a video: {backbone.no_videos()}")
        return read_video(url, f"{field_path}.url", sampling, self.limits)


def _read_logprobs(fields: Mapping[str, Any]) -> int | None:
    """Reads the fields of log-probabilities.

    Args:
        fields: fields of the body.

    Returns:
        The number of most probable tokens to report at each position. None if the request does not
        ask for log-probabilities.

    Raises:
        RequestError: `top_logprobs` is set without `logprobs`.
    """
    num_top_logprobs = fields.get("top_logprobs", 0)
    if fields.get("logprobs", False):
        return num_top_logprobs
    if num_top_logprobs:
        message = f"top_logprobs is {num_top_logprobs}, expected logprobs to be true"
        raise RequestError(400, message, "top_logprobs")
    return None


def _reject_constant(name: str) -> None:
    """Raises a UserError for NaN and infinities, which Python's JSON parser would accept."""
    raise UserError(f"{name} is not a JSON number")
