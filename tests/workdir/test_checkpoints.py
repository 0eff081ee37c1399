"""Checkpoints: complete or absent, damaged ones noticed and left out, whatever is damaged."""

import contextlib
import functools
import os
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
    """Leaves of the types that a training state has."""
    random = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(random.normal(size=(40, 30)), jnp.float32),
        "half": jnp.asarray(random.normal(size=7), jnp.bfloat16),
        "count": jnp.int32(seed),
        "flag": jnp.array([True, False]),
        "key": jax.random.key_data(jax.random.key(seed)),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the states after steps 10 and 20."""
    folder = tmp_path_factory.mktemp("two")
    with contextlib.closing(Checkpoints(folder, 3)) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, tree(step), {"next": step, "ids": ["ä"]})
    return folder


@pytest.fixture
def copy(two, tmp_path):
    return shutil.copytree(two, tmp_path / "copy")


def restore(folder, like=None):
    with contextlib.closing(Checkpoints(folder, 3)) as checkpoints:
        return checkpoints.restore(lambda step: tree(0) if like is None else like)


def assert_state(found, step):
    assert found.step == step and found.about == {"next": step, "ids": ["ä"]}
    jax.tree.map(np.testing.assert_array_equal, found.saved, tree(step))
    assert jax.tree.map(lambda x: x.dtype, found.saved) == jax.tree.map(lambda x: x.dtype, tree(0))


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_state_may_be_donated_while_it_is_written(tmp_path):
    @functools.partial(jax.jit, donate_argnums=0)
    def following(state):
        return jax.tree.map(lambda x: x + 1, state)

    state = {"x": jnp.zeros((1000, 1000))}
    with contextlib.closing(Checkpoints(tmp_path, 5)) as checkpoints:
        for step in range(1, 6):
            state = following(state)
            checkpoints.save(step, state)
        for _ in range(20):
            state = following(state)
        jax.block_until_ready(state)
        found = checkpoints.restore(lambda step: state)
    assert found.step == 5
    np.testing.assert_array_equal(found.saved["x"], 5)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [flip, remove])
def test_whatever_file_is_damaged_no_wrong_number_comes_back(two, tmp_path, damage, capsys):
    """A file either does not matter for the arrays, or the state before takes over."""
    taken = []
    for number in range(len(files(two / "checkpoints" / "20"))):
        folder = shutil.copytree(two, tmp_path / str(number))
        damage(files(folder / "checkpoints" / "20")[number])
        found = restore(folder)
        assert_state(found, found.step)
        said = capsys.readouterr().err
        if found.step == 10:
            assert "warning: checkpoint 20 is damaged" in said
            assert said.strip().endswith("resuming from 10") and said.count("\n") == 1
        taken.append(found.step)
    assert set(taken) <= {10, 20} and taken.count(10) >= 4  # arrays and what belongs to them


@pytest.mark.parametrize("name", ["._manifest.ocdbt", ".DS_Store", ".nfs000000000000001"])
def test_a_file_that_an_operating_system_adds_is_no_damage(copy, name, capsys):
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
def test_a_checkpoint_of_other_files_than_were_written_is_damaged(copy, capsys, change):
    change(copy / "checkpoints" / "20")
    assert read_latest(copy).step == 10
    assert_state(restore(copy), 10)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and all("is damaged (" in line for line in told)


def test_metadata_that_keep_the_folder_from_opening_are_named(copy):
    (copy / "checkpoints" / "20" / "_CHECKPOINT_METADATA").write_text("[]")
    for read in (read_latest, restore):
        with pytest.raises(ValueError, match=r"_CHECKPOINT_METADATA") as bad:
            read(copy)
        assert isinstance(bad.value, UserError)


def test_a_damaged_checkpoint_makes_room_for_a_new_one(copy):
    flip(next(p for p in files(copy / "checkpoints" / "20") if "/d/" in str(p)))
    with contextlib.closing(Checkpoints(copy, 3)) as checkpoints:
        assert checkpoints.restore(lambda step: tree(0)).step == checkpoints.latest == 10
        checkpoints.save(20, tree(20), {"next": 20, "ids": ["ä"]})
    assert_state(restore(copy), 20)
    assert len(list((copy / "damaged").iterdir())) == 1


def test_what_was_being_written_does_not_count(copy):
    torn = copy / "checkpoints" / "30.orbax-checkpoint-tmp"
    shutil.copytree(copy / "checkpoints" / "20", torn)
    (copy / "checkpoints" / "10").rename(copy / "checkpoints" / "15.orbax-checkpoint-tmp-7")
    assert_state(restore(copy), 20)


def test_states_of_other_shapes_are_refused_and_left_where_they_are(copy):
    before = files(copy)
    for change in ({"kernel": jnp.zeros((40, 31))}, {"another": jnp.zeros(2)}):
        with pytest.raises(ValueError, match="was written by another version"):
            restore(copy, tree(0) | change)
    assert files(copy) == before


def test_if_all_are_damaged_nothing_is_moved(copy):
    for step in ("10", "20"):
        flip(copy / "checkpoints" / step / "beside" / "metadata")
    before = files(copy)
    with pytest.raises(ValueError, match=r"can be read \(20 .*; 10 "):
        restore(copy)
    assert files(copy) == before


def test_a_state_comes_back_on_other_devices(copy):
    mesh = build_mesh({"data": 4}, jax.devices()[:4])
    like = jax.device_put(tree(0), NamedSharding(mesh, P()))
    found = restore(copy, like)
    assert_state(found, 20)
    assert all(len(leaf.devices()) == 4 for leaf in jax.tree.leaves(found.saved))


def test_a_state_is_read_without_knowing_it_and_without_its_devices(tmp_path):
    mesh = build_mesh({"data": 4}, jax.devices()[:4])
    saved = {"state": tree(1), "stats": tree(2), "key": tree(3)["key"]}
    spread = jax.device_put(saved, NamedSharding(mesh, P()))
    with contextlib.closing(Checkpoints(tmp_path, 2)) as checkpoints:
        checkpoints.save(7, spread, {"a": 1})
    step, arrays, about = read_latest(tmp_path)
    assert step == 7 and about == {"a": 1}
    jax.tree.map(np.testing.assert_array_equal, arrays, saved)
    assert {device for leaf in jax.tree.leaves(arrays) for device in leaf.devices()} == {
        jax.devices()[0]
    }
