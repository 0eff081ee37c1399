"""The lines of a run's log, and what explains them."""

import pytest
from pages import ROOT

from stepprune_jax.workdir.metrics import _LINE_PARTS, MetricsLog

GATE_ROW = {"loss": 1.5, "k_mean": 9.0, "k_std": 2.0, "k_floor": 0.0, "k_cap": 0.25}


@pytest.fixture
def log(tmp_path):
    return MetricsLog(tmp_path, 0, 9, 1)


def test_names_are_explained_before_the_first_line_that_has_them(log, capsys):
    log.write(1, GATE_ROW)
    *explanation, line = capsys.readouterr().out.splitlines()
    assert "metrics.jsonl" in explanation[0]
    assert "  K +- (k_mean, k_std): tokens that the learned stop keeps" in explanation[2]
    assert "K 9.0 +- 2.0" in line and "at minimum/T_max 0.00/0.25" in line
    log.write(2, GATE_ROW)
    assert len(capsys.readouterr().out.splitlines()) == 1
    log.write(3, {"loss": 1.0, "reward": 0.5}, phase="rloo")
    _, explanation, line = capsys.readouterr().out.splitlines()
    assert explanation.startswith("  reward (reward): mean probability")
    assert "rloo" in line and "reward 0.500" in line


def test_the_page_about_training_explains_every_name():
    page = (ROOT / "docs" / "training.md").read_text()
    for part in _LINE_PARTS:
        for name in part.decimals if part.meaning else ():
            assert f"`{name}`" in page, name
