"""Long JSON lists: the entries and their places, however the file is cut into reads."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.data import json_array
from stepprune_jax.data.json_array import JsonEntries, scan_json_list
from stepprune_jax.data.json_files import read_json_list

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(VALUES, min_size=1, max_size=6),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    escaped=st.booleans(),
    mark=st.booleans(),
)
def test_entries_and_places_do_not_depend_on_the_reads(
    tmp_path_factory, values, chunk, indent, escaped, mark
):
    file = tmp_path_factory.getbasetemp() / "list.json"
    text = json.dumps(values, indent=indent, ensure_ascii=escaped)
    file.write_bytes(b"\xef\xbb\xbf" * mark + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK", chunk)
        found = list(scan_json_list(file))
    assert [entry.value for entry in found] == values
    start, end = (np.array([getattr(e, name) for e in found]) for name in ("start", "end"))
    entries = JsonEntries(file, start, end)
    assert [entries[number] for number in range(len(entries))] == values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "column 1: not JSON"),
        (b"[", "column 2: not JSON"),
        (b"[]", "expected at least one sample, got an empty list"),
        (b"{}", "expected a JSON list, got an empty object"),
        (b"[1, 2", "not JSON"),
        (b"[1 2]", "not JSON"),
        (b"[1,]", "not JSON"),
        (b"[1] 2", "not JSON"),
        (b"[01]", "not JSON"),
        (b'[\n"\xff"]', "line 2: not UTF-8"),
        (b'[\n{"a": 1}, {"b": }]', "line 2, column 17: not JSON"),
        (b'[\n"a",\n"b', "line 3, column 1: not JSON"),
        (b"[" * 200_000, "nested too deep"),
        (b"[" + b"1" * 5000 + b"]", "unreadable JSON"),
        (b"12", "expected a JSON list, got 12"),
    ],
)
def test_both_readers_refuse_a_file_in_the_same_words(tmp_path, content, message):
    file = tmp_path / "list.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as expected:
        read_json_list(file, "sample")
    with pytest.raises(ValueError) as found:
        list(scan_json_list(file, "sample"))
    assert str(found.value) == str(expected.value)
    assert str(file) in str(found.value) and message in str(found.value)


def test_missing_and_changed_files_are_named(tmp_path):
    file = tmp_path / "list.json"
    with pytest.raises(FileNotFoundError, match=r"list\.json"):
        list(scan_json_list(file))
    file.write_text('["a", "b"]')
    second = list(scan_json_list(file))[1]
    entries = JsonEntries(file, np.array([second.start]), np.array([second.end]))
    file.write_text('["longer", "b"]')
    with pytest.raises(ValueError, match=r"sample 0 is not where it was: the file has changed"):
        entries[0]
