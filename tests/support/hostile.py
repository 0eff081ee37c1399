"""What hostile files are made of, and what may become of them."""

import contextlib
import json

from hypothesis import settings
from hypothesis import strategies as st

from stepprune_jax.user_input import UserError


def cases(count):
    """So many examples in the suite, and more in the profile of `make fuzz`."""
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
    """Bytes with a few of them changed, cut out, doubled, or the end missing."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["set", "cut", "drop", "double", "insert"]))
        if kind == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 9))]
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
        else:
            data[at:at] = draw(st.binary(max_size=9) | st.just(b"[" * 50_000))
    return bytes(data)


@st.composite
def changed(draw, value):
    """A JSON value in which one to three places hold something else, or nothing."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if isinstance(inner, dict | list) and inner and draw(st.booleans()):
                place = inner
                continue
            if draw(st.integers(0, 4)):
                place[key] = draw(VALUES)
            else:
                del place[key]
            break
    return value


@contextlib.contextmanager
def one_line(*names):
    """What is raised is for the user, in one line that has the names."""
    try:
        yield
    except (UserError, FileNotFoundError) as error:
        said = str(error)
        assert said and "\n" not in said, said
        assert all(str(name) in said for name in names), said
