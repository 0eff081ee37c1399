"""Fields of a chat request: the values that each field may have, and errors that name a field.

OpenAI's interface has many fields that this server does not implement. The server accepts such a
field only with values that change no answer, and refuses all other values. It never ignores what a
client requests. A field that is null counts as absent.
"""

import json
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from stepprune_jax.data.videos import MAX_FPS, MAX_FRAMES
from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import nearest, one_line

# A rule for a field: a function that tells whether a value is valid, and a description of valid
# values for the message "FIELD is VALUE, expected DESCRIPTION".
Rule = tuple[Callable[[Any], bool], str]

# Characters. The server searches for the stop texts after each token, so long texts cost time.
_MAX_STOP_LENGTH = 256
_NO_ENGINE = " without an engine"

# Truncates values in messages to 60 characters, so that a message is one readable line.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


class RequestError(Exception):
    """An error that the server sends in reply to a request.

    Attributes:
        status: HTTP status.
        message: one line with the value and what was expected.
        field: name of the field with the value; None if the error concerns no single field.
    """

    def __init__(self, status: int, message: str, field: str | None = None):
        super().__init__(message)
        self.status, self.message = status, one_line(message)
        self.field = None if field is None else one_line(field[: _REPR.maxstring])


def messages_error(message: str, status: int = 400) -> RequestError:
    """Returns an error about the field `messages`."""
    return RequestError(status, message, "messages")


def quote(value: object) -> str:
    """Returns the `repr` of a client's value for a message, truncated to a readable length."""
    return _REPR.repr(value)


def _only(*valid_values: Any, when: str = "") -> Rule:
    """Returns the rule of a field that accepts only the listed values.

    Args:
        *valid_values: JSON values. Unlike in Python, 1 and true are different values.
        when: condition for the message, such as " without an engine".
    """

    def is_valid(value: Any) -> bool:
        return any(
            value == valid_value and isinstance(value, bool) == isinstance(valid_value, bool)
            for valid_value in valid_values
        )

    return is_valid, " or ".join(map(json.dumps, valid_values)) + when


def _is_unset(value: Any) -> bool:
    """Returns whether a value is -1. In vLLM's interface, -1 is an unset number."""
    return value == -1 and not isinstance(value, bool)


def _is_stop(value: Any) -> bool:
    """Returns whether a value is a stop text, or a list of up to four stop texts."""
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and len(texts) <= 4
        and all(isinstance(text, str) and 0 < len(text) <= _MAX_STOP_LENGTH for text in texts)
    )


def _is_stream_options(value: Any) -> bool:
    """Returns whether a value is an object with no true option but `include_usage`."""
    unsupported_options = ("include_obfuscation", "continuous_usage_stats")
    return isinstance(value, dict) and all(
        isinstance(flag, bool | None)
        and (name == "include_usage" or (name in unsupported_options and not flag))
        for name, flag in value.items()
    )


_ANY: Rule = (lambda _: True, "")
_COUNT: Rule = (is_count, "an integer from 1")
_MAX_TOP_LOGPROBS = 20  # The limit of OpenAI's interface and of vLLM.
_FLAG: Rule = (lambda x: isinstance(x, bool), "true or false")
_NUMBER: Rule = (is_number, "a number")
_OBJECT: Rule = (lambda x: isinstance(x, dict), "an object")
_TEXT: Rule = (lambda x: isinstance(x, str), "a text")

BODY: dict[str, Rule] = {
    "model": _TEXT,
    "messages": (lambda x: isinstance(x, list) and len(x) > 0, "a list of messages"),
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "seed": (lambda x: is_count(x, 0), "an integer from 0"),
    "stop": (_is_stop, f"up to four texts of 1 to {_MAX_STOP_LENGTH} characters"),
    "stream": _FLAG,
    "stream_options": (_is_stream_options, "an object with only include_usage, true or false"),
    "return_token_ids": _FLAG,
    "return_kept_tokens": _FLAG,
    "pruner": _TEXT,
    "budget": (
        lambda x: isinstance(x, str) or is_count(x),
        "a count from 1, or a text such as 1/3",
    ),
    "mean_budget": _NUMBER,
    "positions": _TEXT,
    "media_io_kwargs": _OBJECT,
    # Fields that the server does not implement. The valid values describe what the server does.
    "n": _only(1, when=_NO_ENGINE),
    "frequency_penalty": _only(0, when=_NO_ENGINE),
    "presence_penalty": _only(0, when=_NO_ENGINE),
    "logit_bias": _only({}, when=_NO_ENGINE),
    "min_p": _only(0, when=_NO_ENGINE),
    "top_k": _only(0, -1, when=_NO_ENGINE),
    "logprobs": _only(False, when=_NO_ENGINE),
    "top_logprobs": _only(0, when=_NO_ENGINE),
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
    "verbosity": _only("medium"),
    "service_tier": _only("auto", "default"),
    "store": _only(False),
    # Fields with any value that change no answer: they concern the sender, or tools and reasoning,
    # which the models do not have.
    "parallel_tool_calls": _FLAG,
    "reasoning_effort": _TEXT,
    "user": _TEXT,
    "metadata": _OBJECT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
    "prompt_cache_options": _OBJECT,
    "prompt_cache_retention": _TEXT,
}
# Fields that the engine implements. It checks their ranges.
ENGINE: dict[str, Rule] = {
    "n": _COUNT,
    "logprobs": _FLAG,
    "top_logprobs": (
        lambda x: is_count(x, 0) and x <= _MAX_TOP_LOGPROBS,
        f"an integer from 0 to {_MAX_TOP_LOGPROBS}",
    ),
    "frequency_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "logit_bias": _OBJECT,
    "min_p": _NUMBER,
    "top_k": (lambda x: is_count(x, -1), "an integer from 1, or 0 or -1 for all tokens"),
}
MESSAGE: dict[str, Rule] = {
    "role": _TEXT,
    "content": (lambda x: isinstance(x, str | list), "a text, or a list of parts"),
    # Chat templates have no place for names or for the reasoning of other models.
    "name": _TEXT,
    "reasoning": _TEXT,
    "reasoning_content": _TEXT,
    # Clients return earlier answers with the fields that they stored.
    "annotations": _only([]),
    "tool_calls": _only([]),
    "provider_specific_fields": (
        lambda x: isinstance(x, dict) and not any(x.values()),
        "an object whose values are all empty",
    ),
}
PART: dict[str, Rule] = {
    "type": _TEXT,
    "text": _TEXT,
    "image_url": _ANY,
    "video_url": _ANY,
    "cache_control": _OBJECT,
    "prompt_cache_breakpoint": _OBJECT,
}
IMAGE_URL: dict[str, Rule] = {
    "url": _ANY,
    # Images always have the resolution that the model expects.
    "detail": _only("auto", "low", "high", "original"),
}
VIDEO_URL: dict[str, Rule] = {"url": _ANY}
# Fields of `media_io_kwargs`, with the names of vLLM.
MEDIA: dict[str, Rule] = {"video": _OBJECT}
VIDEO_SAMPLING: dict[str, Rule] = {
    "num_frames": (
        lambda x: (is_count(x) and x <= MAX_FRAMES) or _is_unset(x),
        f"1 to {MAX_FRAMES}, or -1 for all frames",
    ),
    "fps": (
        lambda x: (is_number(x) and 0 < x <= MAX_FPS) or _is_unset(x),
        f"a rate above 0, up to {MAX_FPS:g}, or -1 for no rate",
    ),
}


def read_fields(value: Any, field_path: str, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Checks a JSON object of a request, and returns its fields without fields that are null.

    Args:
        value: the parsed JSON value.
        field_path: path of the object in the request, such as "messages[0]"; "" for the body. Its
            first name is the field that the object belongs to.
        rules: the fields that the object may have, with the rule of each field.

    Raises:
        RequestError: `value` is not an object, a field is unknown, or a field has an invalid value.
            The message names the field.
    """
    object_name = field_path or "the body"
    top_field = re.split(r"[.\[]", field_path)[0] or None
    if not isinstance(value, dict):
        raise RequestError(400, f"{object_name} is {quote(value)}, expected an object", top_field)
    fields = {name: content for name, content in value.items() if content is not None}
    for name, content in fields.items():
        if name not in rules:
            hint = nearest(name, rules)
            message = f"{object_name} has {quote(name)}, which is not supported.{hint}"
            raise RequestError(400, message, top_field or name)
        is_valid, expected = rules[name]
        if not is_valid(content):
            full_name = f"{field_path}.{name}" if field_path else name
            message = f"{full_name} is {quote(content)}, expected {expected}"
            raise RequestError(400, message, top_field or name)
    return fields
