"""Fields of OpenAI's chat interface, and what each may be.

Clients send many that ask for nothing: these may have the values that change no answer, and no
others, as nothing that is asked for is ignored. A field that is null is as good as absent.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from stepprune_jax.serving.errors import RequestError, refuse_unless, shown
from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import nearest

Rule = tuple[Callable[[Any], bool], str]  # whether a value fits, and what was expected

_LONGEST_STOP = 256  # characters; each token of an answer is compared with all of them

_ALONE = " without an engine"


def _only(*values: Any, when: str = "") -> Rule:
    """Returns the rule of a field that may only have some values; 1 is not true."""

    def fits(given: Any) -> bool:
        return any(given == x and isinstance(given, bool) == isinstance(x, bool) for x in values)

    return fits, " or ".join(map(json.dumps, values)) + when


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and len(texts) <= 4
        and all(isinstance(x, str) and 0 < len(x) <= _LONGEST_STOP for x in texts)
    )


def _is_stream_options(value: Any) -> bool:
    """Returns whether a stream is asked for its usage at most."""
    others = ("include_obfuscation", "continuous_usage_stats")
    return isinstance(value, dict) and all(
        isinstance(v, bool | None) and (k == "include_usage" or (k in others and not v))
        for k, v in value.items()
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
    "stop": (_is_stop, f"up to four texts of 1 to {_LONGEST_STOP} characters"),
    "stream": _FLAG,
    "stream_options": (_is_stream_options, "include_usage alone, true or false"),
    "return_token_ids": _FLAG,
    "pruner": _TEXT,
    "budget": (lambda x: isinstance(x, str) or is_count(x), "a count, or a text such as 1/3"),
    "mean_budget": _NUMBER,
    "positions": _TEXT,
    # They may only ask for what is done anyway.
    "n": _only(1),
    "frequency_penalty": _only(0, when=_ALONE),
    "presence_penalty": _only(0, when=_ALONE),
    "logit_bias": _only({}, when=_ALONE),
    "min_p": _only(0, when=_ALONE),
    "top_k": _only(0, -1, when=_ALONE),
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
    # They are about tools, about thoughts, which the models do not have, and about the sender.
    "parallel_tool_calls": _FLAG,
    "reasoning_effort": _TEXT,
    "user": _TEXT,
    "metadata": _OBJECT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
    "prompt_cache_options": _OBJECT,
    "prompt_cache_retention": _TEXT,
}
# What an engine such as vLLM does itself, and checks further.
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
    # The templates have no place for names, nor for thoughts of other models.
    "name": _TEXT,
    "reasoning": _TEXT,
    "reasoning_content": _TEXT,
    # An answer may come back as a client has kept it.
    "annotations": _only([]),
    "tool_calls": _only([]),
    "provider_specific_fields": (
        lambda x: isinstance(x, dict) and not any(x.values()),
        "an object without values",
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
    "detail": _only("auto", "low", "high", "original"),  # an image has the size of the model
}


def read_fields(value: Any, where: str, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Returns the fields of an object that are not null.

    Args:
        value: the object.
        where: where the request has it; "" for the body itself.
        rules: the fields that it may have.

    Raises:
        RequestError: it is no object, or a field is unknown or has a bad value; the message names
            it.
    """
    field, here = ("messages", where) if where else (None, "the body")
    if not isinstance(value, dict):
        raise RequestError(400, f"{here} is {shown(value)}, expected an object", field)
    for name, given in value.items():
        if given is None:
            continue
        message = f"{here} has {shown(name)}, which is not supported.{nearest(name, rules)}"
        refuse_unless(name in rules, field or name, message)
        fits, expected = rules[name]
        full = f"{where}.{name}" if where else name
        refuse_unless(fits(given), field or name, f"{full} is {shown(given)}, expected {expected}")
    return {name: given for name, given in value.items() if given is not None}
