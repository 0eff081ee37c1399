import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.checkpoints import safetensors as ours

BF16 = np.dtype(ml_dtypes.bfloat16)


def _write(path, **tensors):
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    ours.write_file(path, specs, iter(tensors.values()))
    return path


def _content(header, data=bytes(8)):
    """Returns the bytes of a file with this header, an object or its bytes, and these numbers."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def test_files_are_compatible_with_the_safetensors_package(tmp_path):
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.float16([1, 2])
    tensors = {"a": a, "b": b, "scalar": np.array(3, np.float32)}
    loaded = safetensors.numpy.load_file(_write(tmp_path / "ours.safetensors", **tensors))
    safetensors.numpy.save_file(tensors, tmp_path / "package.safetensors")
    entries = ours.read_header(tmp_path / "package.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)
        np.testing.assert_array_equal(ours.read_tensor(entries[name]), tensor)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_block_equals_the_slice_of_the_tensor(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    index = tuple(
        slice(*sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))))
        for size in shape[:2]
    )
    tensor = np.arange(np.prod(shape)).reshape(shape).astype(BF16)
    path = _write(tmp_path_factory.mktemp("block") / "x.safetensors", pad=np.int8([1]), x=tensor)
    entry = ours.read_header(path)["x"]
    np.testing.assert_array_equal(ours.read_tensor(entry, index), tensor[index])
    np.testing.assert_array_equal(ours.read_tensor(entry), tensor)


RECORD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        (99).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"{]}}",
        (50_000).to_bytes(8, "little") + b"[" * 50_000,
        (19).to_bytes(8, "little") + b'{"__metadata__":[]}',
        # Ambiguous headers: a repeated name, and another encoding.
        _content(f'{{"w": {json.dumps(RECORD)}, "w": {json.dumps(RECORD)}}}'.encode()),
        _content(json.dumps({"w": RECORD}).encode("utf-16")),
        # Impossible tensors.
        _content({"w": RECORD | {"data_offsets": [8, 16]}}),
        _content({"w": RECORD | {"data_offsets": [0, 4]}}),
        _content({"w": RECORD | {"data_offsets": [-8, 0]}}),
        _content({"w": RECORD | {"dtype": "F4"}}),
        _content({"w": RECORD | {"shape": [-1, -2]}}),
        _content({"w": RECORD | {"shape": [10**30]}}),
        _content({"w": []}),
    ],
)
def test_the_error_names_a_file_with_a_bad_header(tmp_path, content):
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=path.name):
        ours.read_header(path)


def test_tensors_that_share_bytes_are_refused(tmp_path):
    header = {"w": RECORD, "v": RECORD | {"data_offsets": [4, 12]}}
    path = tmp_path / "shard.safetensors"
    path.write_bytes(_content(header, bytes(12)))
    with pytest.raises(ValueError, match=r"shard\.safetensors: .*'v' overlaps"):
        ours.read_header(path)
    header["v"] = RECORD | {"data_offsets": [8, 16]}
    header["empty"] = {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}
    path.write_bytes(_content(header, bytes(16)))
    assert set(ours.read_header(path)) == {"w", "v", "empty"}


@pytest.mark.parametrize(
    ("value", "stored", "target", "problem"),
    [
        *(
            (value, stored, stored, problem)
            for stored in ("F32", "BF16", "F8_E4M3", "F8_E5M2")
            for value, problem in ((-0.0, ""), (-1.5, ""), (np.nan, "NaN"), (-np.inf, "infinity"))
        ),
        (65504, "F32", "F16", ""),
        (65520, "F32", "F16", "too large for float16"),
        (65536, "BF16", "F16", "too large for float16"),
        (1e300, "F64", "F32", "too large for float32"),
        (3.4e38, "F32", "BF16", "too large for bfloat16"),
        (3.3e38, "F32", "BF16", ""),
        (65504, "F16", "BF16", ""),
    ],
)
def test_numbers_too_large_for_the_target_dtype_are_refused(
    tmp_path, value, stored, target, problem
):
    tensor = np.array([[1, value], [0, 2]]).astype(ours.DTYPES[stored])
    entry = ours.read_header(_write(tmp_path / "x.safetensors", w=tensor))["w"]
    dtype = ours.DTYPES[target]
    np.testing.assert_array_equal(ours.read_tensor(entry, (slice(1, 2),), dtype), tensor[1:])
    if problem:
        with pytest.raises(ValueError, match=rf"x\.safetensors: 'w' holds .*{problem}"):
            ours.read_tensor(entry, dtype=dtype)
    else:
        np.testing.assert_array_equal(ours.read_tensor(entry, dtype=dtype), tensor)


def test_the_error_names_a_file_that_was_truncated_after_reading_its_header(tmp_path):
    path = _write(tmp_path / "x.safetensors", x=np.zeros(100, np.float32))
    entry = ours.read_header(path)["x"]
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 8)
    with pytest.raises(ValueError, match=r"x\.safetensors is truncated"):
        ours.read_tensor(entry)


def test_a_failed_write_leaves_no_file(tmp_path):
    specs = {"a": (np.dtype(np.float32), (2,))}
    with pytest.raises(ValueError):
        ours.write_file(tmp_path / "x.safetensors", specs, [])
    assert list(tmp_path.iterdir()) == []
