"""Errors of a full or read-only disk."""

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


def test_the_error_of_a_full_disk_names_the_metrics(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, 0, 2, 1)
    log.write(1, {"loss": 1.0})
    monkeypatch.setattr(json, "dumps", refuse)  # Replaces the failing write.
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        log.write(2, {"loss": 1.0})


def test_a_failed_write_keeps_the_old_file_and_no_partial_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"a": "µ \udcff"})  # A name may have bytes that are not UTF-8.
    assert read_json_object(path) == {"a": "µ \udcff"}
    write_json(path, {"a": 1})
    original = path.read_bytes()
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=r"No space left on device: '.*x\.json\.partial'"):
        write_json(path, {"a": 2})
    assert path.read_bytes() == original and [*tmp_path.iterdir()] == [path]


def too_large(*_, **__):
    raise ValueError("OUT_OF_RANGE: Failed writing: \"x\": File too large [os_error_code='27']")


@pytest.mark.parametrize(("background", "failing"), [(False, too_large), (True, refuse)])
def test_a_checkpoint_that_cannot_be_written_is_a_user_error(
    tmp_path, monkeypatch, background, failing
):
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, {"x": jnp.ones(3)})
    checkpoints._manager.wait_until_finished()
    if background:  # Fails in the thread that writes in the background.
        monkeypatch.setattr("stepprune_jax.workdir.checkpoints.file_identity", failing)
    else:
        monkeypatch.setattr(checkpoints._manager, "save", failing)
    with pytest.raises(UserError) as error:
        checkpoints.save(2, {"x": jnp.ones(3)})
        checkpoints.close()
    message = str(error.value)
    assert f"checkpoint 2 cannot be written to {tmp_path}/checkpoints; earlier ones" in message
    assert ("No space left" if background else "File too large") in message
    assert "\n" not in message


def test_a_resumed_run_without_metrics_logs_a_warning(tmp_path, capsys):
    MetricsLog(tmp_path, 3, 9, 1)
    assert "metrics.jsonl is missing: it will start after step 3" in capsys.readouterr().err
