"""TensorBoard and Weights & Biases with their real packages: `make test-boards`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interfaces import read_record, record_in

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv-boards"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="TensorBoard and wandb: make test-boards"),
]
SETTINGS = {"PYTHONPATH": f"{PACKAGES}:{ROOT}", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
CODE = """
from pathlib import Path
from stepprune_jax.workdir.metrics import open_boards
for step in (1, 2):
    boards = open_boards(True, "pruning", Path("run"), step - 1, {"policy.width": 8})
    for board in boards:
        board.add({f"loss_of_step_{step}": 0.5}, step)
        board.close()
"""


def test_the_packages_have_the_recorded_signatures():
    assert record_in(sys.executable, "boards", **SETTINGS) == read_record("boards")


def test_scalars_of_a_run_and_of_its_resumed_run_are_written(tmp_path):
    (tmp_path / "run").mkdir()
    environment = os.environ | SETTINGS
    subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, env=environment, check=True)
    events = b"".join(file.read_bytes() for file in tmp_path.glob("run/tensorboard/*"))
    runs = [*tmp_path.glob("run/wandb/offline-run-*/*.wandb")]
    assert len(runs) == 2 and len({file.stem for file in runs}) == 1
    wandb_content = b"".join(file.read_bytes() for file in runs)
    for name in (b"loss_of_step_1", b"loss_of_step_2"):
        assert name in events and name in wandb_content
