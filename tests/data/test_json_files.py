"""Errors of reading JSON files name the mistake and its place."""

import pytest

from stepprune_jax.data.json_files import read_json_list


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ", column 1: not JSON"),
        (b"[]", ": expected at least one sample, got an empty list"),
        (b"12", ": expected a JSON list, got 12"),
        (b'{"a": 1}\n{"a": 2}\n', ": expected one list, not an object per line"),
        (b'[\n"\xff"]', ": line 2: not UTF-8"),
        (b'[\n"a",\n"b', ", line 3, column 1: not JSON"),
        (b"[" * 200_000, "nested too deep"),
        (b"[" + b"1" * 5000 + b"]", "unreadable JSON"),
    ],
)
def test_a_file_without_a_json_list_is_refused(tmp_path, content, message):
    file = tmp_path / "list.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_json_list(file, "sample")
    assert str(error.value).startswith(str(file)) and message in str(error.value)


def test_a_byte_order_mark_is_dropped_and_the_error_names_a_missing_file(tmp_path):
    file = tmp_path / "list.json"
    with pytest.raises(FileNotFoundError, match=r"no file at .*list\.json"):
        read_json_list(file)
    file.write_bytes(b"\xef\xbb\xbf" + '[{"a": "é"}]'.encode())
    assert read_json_list(file) == [{"a": "é"}]
