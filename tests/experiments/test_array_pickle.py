"""Pickles of arrays are read, whoever wrote them; any that would run code are refused."""

import io
import os
import pickle

import numpy as np
import pytest
from sort_of_clevr_file import Python2

from experiments.datasets.array_pickle import Array, read_pickle

VALUE = (
    [np.arange(6.0).reshape(2, 3) / 7, np.asarray([1, -2], ">i4")],
    {"a": (np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)), "é", None)},
    [np.float64(0.5), np.int64(-3), np.bool_(True), 7, 1.5],
)


def plain(value):
    if isinstance(value, Array):
        return value.values
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def as_python_2(protocol):
    out = io.BytesIO()
    Python2(out, protocol).dump(VALUE)
    return out.getvalue().replace(b"cnumpy._core.", b"cnumpy.core.")


# As text, in binary, and with buffers.
@pytest.mark.parametrize(
    "data",
    [*(pickle.dumps(VALUE, protocol) for protocol in (0, 2, 5)), as_python_2(0), as_python_2(2)],
    ids=["0", "2", "5", "python2-0", "python2-2"],
)
@pytest.mark.filterwarnings("ignore:numpy.core")
def test_what_is_read_is_what_was_written(tmp_path, data):
    path = tmp_path / "a.pickle"
    path.write_bytes(data)
    found = plain(read_pickle(path))
    np.testing.assert_equal(found, VALUE)
    assert [type(number) for number in found[2]] == [float, int, bool, int, float]


class Evil:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda mark: Evil(os.system, f"touch {mark}"), r"'(posix|nt)\.system'"),
        (lambda mark: Evil(np.save, str(mark), 1), r"'numpy\.save'"),
        (lambda mark: np.asarray([Evil(os.mkdir, str(mark))]), "the dtype 'O8'"),
    ],
    ids=["os", "numpy", "objects"],
)
@pytest.mark.parametrize("protocol", [0, 4])
def test_any_other_name_is_refused_before_it_is_looked_up(tmp_path, make, name, protocol):
    path, mark = tmp_path / "a.pickle", tmp_path / "mark"
    path.write_bytes(pickle.dumps([np.ones(2), make(mark)], protocol))
    with pytest.raises(ValueError, match=rf"a\.pickle: names {name}, which is not") as found:
        read_pickle(path)
    assert "\n" not in str(found.value) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"c_codecs\nencode\n(Va\nVrot13\ntR.", "names the codec 'rot13'"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.", "names 'numpy.ndarray.dumps'"),
        (b"cno such\x0bmodule\nx\n.", r"names 'no such\\x0bmodule.x'"),
        (b"Pa\n.", "not a readable pickle"),  # a persistent id
        (b"cnumpy\nndarray\n}b.", "not a readable pickle"),  # a class given a state
        (b"", "not a readable pickle: Ran out of input"),
        (pickle.dumps(np.ones(3), 2).replace(b"K\x03", b"K\x04"), "not a readable pickle"),
    ],
)
def test_hostile_and_damaged_files_are_one_line(tmp_path, data, message):
    path = tmp_path / "a.pickle"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as found:
        read_pickle(path)
    assert str(path) in str(found.value) and "\n" not in str(found.value)
