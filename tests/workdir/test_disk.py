"""What a full or read-only disk does to the files of a run."""

import errno
import json
import os

import jax.numpy as jnp
import pytest

from stepprune_jax.data.json_files import read_json_object, write_json
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir.checkpoints import Checkpoints
from stepprune_jax.workdir.metrics import MetricsLog


def refuse(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_metrics(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, 0, 2, 1)
    log.write(1, {"loss": 1.0})
    monkeypatch.setattr(json, "dumps", refuse)  # stands for the write behind it
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        log.write(2, {"loss": 1.0})


def test_a_file_that_cannot_be_replaced_stays_and_leaves_no_half_of_another(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"a": "µ \udcff"})  # as a name that is not UTF-8
    assert read_json_object(path) == {"a": "µ \udcff"}
    write_json(path, {"a": 1})
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=r"No space left on device: '.*x\.json\.partial'"):
        write_json(path, {"a": 2})
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def too_large(*_, **__):
    raise ValueError("OUT_OF_RANGE: Failed writing: \"x\": File too large [os_error_code='27']")


@pytest.mark.parametrize(("background", "failing"), [(False, too_large), (True, refuse)])
def test_a_checkpoint_that_cannot_be_written_is_one_line(
    tmp_path, monkeypatch, background, failing
):
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, {"x": jnp.ones(3)})
    checkpoints._manager.wait_until_finished()
    if background:  # in the thread that writes while training continues
        monkeypatch.setattr("stepprune_jax.workdir.checkpoints.file_identity", failing)
    else:
        monkeypatch.setattr(checkpoints._manager, "save", failing)
    with pytest.raises(UserError) as error:
        checkpoints.save(2, {"x": jnp.ones(3)})
        checkpoints.close()
    said = str(error.value)
    assert f"checkpoint 2 cannot be written to {tmp_path}/checkpoints; earlier ones" in said
    assert ("No space left" if background else "File too large") in said
    assert "\n" not in said


def test_metrics_that_were_deleted_before_resuming_are_missed(tmp_path, capsys):
    MetricsLog(tmp_path, 3, 9, 1)
    assert "metrics.jsonl is missing: it will start after step 3" in capsys.readouterr().err
