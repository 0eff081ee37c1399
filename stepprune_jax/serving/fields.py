"""Fields of a chat request: the values that each field may have, and errors that name a field.

Clients send many fields of OpenAI's interface that request nothing. The server accepts such a field
only with the values that change no answer, and refuses every other value: nothing that a client
requests is ignored. A field that is null counts as absent.
"""

import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import nearest, one_line

# A predicate of valid values, and the end of the message "FIELD is VALUE, expected ...".
Rule = tuple[Callable[[Any], bool], str]

# Characters. Each new token of an answer is compared with all characters of the stop texts.
_MAX_STOP_LENGTH = 256
_NO_ENGINE = " without an engine"

# Values in messages are cut to 60 characters, so that a message stays one readable line.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


class RequestError(Exception):
    """An error that the server sends in reply to a request.

    Attributes:
        status: HTTP status.
        message: one line with the value and what was expected.
        field: the field of the request that has the value; None for errors about no field.
    """

    def __init__(self, status: int, message: str, field: str | None = None):
        super().__init__(message)
        self.status, self.message = status, one_line(message)
        self.field = None if field is None else one_line(field[: _REPR.maxstring])


def messages_error(message: str, status: int = 400) -> RequestError:
    """Returns an error about the field `messages`."""
    return RequestError(status, message, "messages")


def quote(value: object) -> str:
    """Returns the representation of a client's value for a message, cut to a readable length."""
    return _REPR.repr(value)


def _only(*values: Any, when: str = "") -> Rule:
    """Returns the rule of a field that accepts only these values; 1 does not equal true."""

    def is_valid(value: Any) -> bool:
        return any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in values)

    return is_valid, " or ".join(map(json.dumps, values)) + when


def _is_stop(value: Any) -> bool:
    """Returns whether a value is a stop text, or a list of up to four stop texts."""
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and len(texts) <= 4
        and all(isinstance(text, str) and 0 < len(text) <= _MAX_STOP_LENGTH for text in texts)
    )


def _is_stream_options(value: Any) -> bool:
    """Returns whether `include_usage` is the only option that is set."""
    unset_options = ("include_obfuscation", "continuous_usage_stats")
    return isinstance(value, dict) and all(
        isinstance(flag, bool | None)
        and (name == "include_usage" or (name in unset_options and not flag))
        for name, flag in value.items()
    )


_ANY: Rule = (lambda _: True, "")
_COUNT: Rule = (is_count, "an integer from 1")
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
    "pruner": _TEXT,
    "budget": (lambda x: isinstance(x, str) or is_count(x), "a count, or a text such as 1/3"),
    "mean_budget": _NUMBER,
    "positions": _TEXT,
    # The server accepts the values that describe what it does for every request.
    "n": _only(1),
    "frequency_penalty": _only(0, when=_NO_ENGINE),
    "presence_penalty": _only(0, when=_NO_ENGINE),
    "logit_bias": _only({}, when=_NO_ENGINE),
    "min_p": _only(0, when=_NO_ENGINE),
    "top_k": _only(0, -1, when=_NO_ENGINE),
    "logprobs": _only(False),
    "top_logprobs": _only(0),
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
    "verbosity": _only("medium"),
    "service_tier": _only("auto", "default"),
    "store": _only(False),
    # These fields concern tools and reasoning, which the models do not have, and the sender.
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
    "cache_control": _OBJECT,
    "prompt_cache_breakpoint": _OBJECT,
}
IMAGE_URL: dict[str, Rule] = {
    "url": _ANY,
    "detail": _only(
        "auto", "low", "high", "original"
    ),  # images always have the size that the model expects
}


def read_fields(value: Any, field_path: str, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Checks an object and returns its fields that are not null.

    Args:
        value: the object.
        field_path: where the request has the object, such as "messages[0]"; "" for the body.
        rules: the fields that the object may have, with the rule of each.

    Raises:
        RequestError: `value` is no object, a field is unknown, or a field has an invalid value. The
            message names the field.
    """
    field, owner = ("messages", field_path) if field_path else (None, "the body")
    if not isinstance(value, dict):
        raise RequestError(400, f"{owner} is {quote(value)}, expected an object", field)
    fields = {name: content for name, content in value.items() if content is not None}
    for name, content in fields.items():
        if name not in rules:
            message = f"{owner} has {quote(name)}, which is not supported.{nearest(name, rules)}"
            raise RequestError(400, message, field or name)
        is_valid, expected = rules[name]
        if not is_valid(content):
            full_name = f"{field_path}.{name}" if field_path else name
            message = f"{full_name} is {quote(content)}, expected {expected}"
            raise RequestError(400, message, field or name)
    return fields
