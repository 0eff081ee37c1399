"""Checkpoints: they are complete or absent, and damaged checkpoints are detected."""

import contextlib
import functools
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir.checkpoints import Checkpoints, read_latest


def tree(seed):
    """Returns arrays of the types that a training state has."""
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(size=(40, 30)), jnp.float32),
        "half": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
        "count": jnp.int32(seed),
        "flag": jnp.array([True, False]),
        "key": jax.random.key_data(jax.random.key(seed)),
    }


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    """Returns a folder with checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("two")
    with contextlib.closing(Checkpoints(folder, 3)) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, tree(step), {"next": step, "ids": ["ä"]})
    return folder


@pytest.fixture
def copy(checkpoint_folder, tmp_path):
    return shutil.copytree(checkpoint_folder, tmp_path / "copy")


def restore(folder, template=None):
    with contextlib.closing(Checkpoints(folder, 3)) as checkpoints:
        return checkpoints.restore(lambda step: tree(0) if template is None else template)


def assert_state(restored, step):
    assert restored.step == step and restored.metadata == {"next": step, "ids": ["ä"]}
    jax.tree.map(np.testing.assert_array_equal, restored.arrays, tree(step))
    dtypes = [jax.tree.map(lambda x: x.dtype, arrays) for arrays in (restored.arrays, tree(0))]
    assert dtypes[0] == dtypes[1]


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_state_may_be_donated_while_it_is_written(tmp_path):
    @functools.partial(jax.jit, donate_argnums=0)
    def next_state(state):
        return jax.tree.map(lambda x: x + 1, state)

    state = {"x": jnp.zeros((1000, 1000))}
    with contextlib.closing(Checkpoints(tmp_path, 5)) as checkpoints:
        for step in range(1, 6):
            state = next_state(state)
            checkpoints.save(step, state)
        for _ in range(20):
            state = next_state(state)
        jax.block_until_ready(state)
        restored = checkpoints.restore(lambda step: state)
    assert restored.step == 5
    np.testing.assert_array_equal(restored.arrays["x"], 5)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, pathlib.Path.unlink])
def test_no_damaged_file_changes_a_restored_number(checkpoint_folder, tmp_path, damage, capsys):
    """Either the file does not matter for the arrays, or the earlier checkpoint is restored."""
    steps = []
    for number in range(len(files(checkpoint_folder / "checkpoints" / "20"))):
        folder = shutil.copytree(checkpoint_folder, tmp_path / str(number))
        damage(files(folder / "checkpoints" / "20")[number])
        restored = restore(folder)
        assert_state(restored, restored.step)
        printed = capsys.readouterr().err
        if restored.step == 10:
            assert "warning: checkpoint 20 is damaged" in printed
            assert printed.strip().endswith("resuming from 10") and printed.count("\n") == 1
        steps.append(restored.step)
    assert set(steps) <= {10, 20} and steps.count(10) >= 4  # The arrays have at least four files.


@pytest.mark.parametrize("name", ["._manifest.ocdbt", ".DS_Store", ".nfs000000000000001"])
def test_files_of_the_operating_system_are_ignored(copy, name, capsys):
    (copy / "checkpoints" / "20" / "arrays" / name).write_bytes(b"\0\5\x16\7")
    assert_state(restore(copy), 20)
    assert not capsys.readouterr().err and not (copy / "damaged").exists()


def replace_by_pipe(step):
    path = next(path for path in files(step) if "/d/" in str(path))
    path.unlink()
    os.mkfifo(path)


def take_other_arrays(step):
    shutil.rmtree(step / "arrays")
    shutil.copytree(step.with_name("10") / "arrays", step / "arrays")


@pytest.mark.parametrize(
    "change",
    [
        lambda step: (step / "hashes.json").write_text("{}"),
        lambda step: (step / "arrays" / "zz").touch(),
        replace_by_pipe,
        take_other_arrays,
        lambda step: step.rename(step.with_name("30")),
    ],
    ids=["no hashes", "a file more", "a pipe", "other arrays", "a new number"],
)
def test_a_checkpoint_with_changed_files_is_damaged(copy, capsys, change):
    change(copy / "checkpoints" / "20")
    assert read_latest(copy).step == 10
    assert_state(restore(copy), 10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("is damaged (" in line for line in lines)


def test_the_error_of_damaged_metadata_names_the_file(copy):
    (copy / "checkpoints" / "20" / "_CHECKPOINT_METADATA").write_text("[]")
    for read in (read_latest, restore):
        with pytest.raises(ValueError, match=r"_CHECKPOINT_METADATA") as error:
            read(copy)
        assert isinstance(error.value, UserError)


def test_a_damaged_checkpoint_can_be_written_again(copy):
    flip(next(path for path in files(copy / "checkpoints" / "20") if "/d/" in str(path)))
    with contextlib.closing(Checkpoints(copy, 3)) as checkpoints:
        assert checkpoints.restore(lambda step: tree(0)).step == checkpoints.latest == 10
        checkpoints.save(20, tree(20), {"next": 20, "ids": ["ä"]})
    assert_state(restore(copy), 20)
    assert len(list((copy / "damaged").iterdir())) == 1


def test_incomplete_checkpoints_are_ignored(copy):
    incomplete = copy / "checkpoints" / "30.orbax-checkpoint-tmp"
    shutil.copytree(copy / "checkpoints" / "20", incomplete)
    (copy / "checkpoints" / "10").rename(copy / "checkpoints" / "15.orbax-checkpoint-tmp-7")
    assert_state(restore(copy), 20)


def test_checkpoints_of_other_shapes_are_refused_and_not_moved(copy):
    original_files = files(copy)
    for change in ({"kernel": jnp.zeros((40, 31))}, {"another": jnp.zeros(2)}):
        with pytest.raises(ValueError, match="was written by another version"):
            restore(copy, tree(0) | change)
    assert files(copy) == original_files


def test_if_all_checkpoints_are_damaged_none_is_moved(copy):
    for step in ("10", "20"):
        flip(copy / "checkpoints" / step / "beside" / "metadata")
    original_files = files(copy)
    with pytest.raises(ValueError, match=r"can be read \(20 .*; 10 "):
        restore(copy)
    assert files(copy) == original_files


def test_a_state_is_restored_to_other_devices(copy):
    mesh = build_mesh({"data": 4}, jax.devices()[:4])
    template = jax.device_put(tree(0), NamedSharding(mesh, P()))
    restored = restore(copy, template)
    assert_state(restored, 20)
    assert all(len(leaf.devices()) == 4 for leaf in jax.tree.leaves(restored.arrays))


def test_the_latest_state_is_read_without_a_template(tmp_path):
    mesh = build_mesh({"data": 4}, jax.devices()[:4])
    state = {"state": tree(1), "stats": tree(2), "key": tree(3)["key"]}
    replicated = jax.device_put(state, NamedSharding(mesh, P()))
    with contextlib.closing(Checkpoints(tmp_path, 2)) as checkpoints:
        checkpoints.save(7, replicated, {"a": 1})
    step, arrays, metadata = read_latest(tmp_path)
    assert step == 7 and metadata == {"a": 1}
    jax.tree.map(np.testing.assert_array_equal, arrays, state)
    devices = [device for leaf in jax.tree.leaves(arrays) for device in leaf.devices()]
    assert {*devices} == {jax.devices()[0]}
