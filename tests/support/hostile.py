"""Generates malformed input for hypothesis, and checks the errors that it causes."""

import contextlib
import json

from hypothesis import settings
from hypothesis import strategies as st

from stepprune_jax.user_input import UserError


def cases(count):
    """Returns settings with `count` examples in the suite, and more in the `make fuzz` profile."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**9, 10**30, 10**400, 1e300, 1e-320]),
    st.sampled_from(["", "..", "nan", "é\u2028", "\0"]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def damaged(draw, data):
    """Draws a copy of bytes with one to four changes, deletions, repetitions or insertions."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(len(data) - 1, 0)))
        edit = draw(st.sampled_from(["set", "truncate", "delete", "repeat", "insert"]))
        if edit == "set" and data:
            data[position] = draw(st.integers(0, 255))
        elif edit == "truncate":
            del data[position:]
        elif edit == "delete":
            del data[position : position + draw(st.integers(1, 9))]
        elif edit == "repeat":
            data[position:position] = data[position : position + draw(st.integers(1, 64))]
        else:
            data[position:position] = draw(st.binary(max_size=9) | st.just(b"[" * 50_000))
    return bytes(data)


@st.composite
def changed(draw, value):
    """Draws a copy of a JSON value with one to three replaced or deleted members."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        container = value
        while True:
            keys = list(container) if isinstance(container, dict) else list(range(len(container)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            member = container[key]
            if isinstance(member, dict | list) and member and draw(st.booleans()):
                container = member
                continue
            if draw(st.integers(0, 4)):
                container[key] = draw(VALUES)
            else:
                del container[key]
            break
    return value


@contextlib.contextmanager
def one_line(*names):
    """Checks that an error inside the context is for users: one line that contains the names."""
    try:
        yield
    except (UserError, FileNotFoundError) as error:
        message = str(error)
        assert message and "\n" not in message, message
        assert all(str(name) in message for name in names), message
