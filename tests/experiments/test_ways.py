"""The study of ways to take a set, on the shipped model."""

import json

import pytest

from experiments.shapes import write_world
from experiments.studies import draws
from stepprune_jax.checkpoints.policy import load_policy


def test_every_way_takes_its_temperature_and_seeds():
    ways = {way.label: way for way in draws.ways(load_policy("shapes"), (3, 4))}
    still = ["argmax", "soft scores", "first step's argmax"]
    drawn = {"first step's draw": 1.0, "draw at 0.3": 0.3, "draw at 1.0": 1.0}
    temperatures = {label: way.policy.config.draw for label, way in ways.items()}
    assert temperatures == dict.fromkeys(still, 0.0) | drawn
    assert {label for label, way in ways.items() if way.seeds == (3, 4)} == {*drawn}


@pytest.mark.slow
def test_the_table_has_a_row_for_each_way_and_the_right_answers(tmp_path, capsys):
    folder = write_world(tmp_path / "world", seed=1, train=0, validation=12, test=0)
    given = "--config configs/shapes.py --policy shapes --limit 48 --budgets 8 48 --seeds 0 1"
    changes = ["--set", f"data.folder={folder}", "cpu_devices=0"]
    draws.main([*given.split(), "--json", str(tmp_path / "draws.json"), *changes])
    rows = json.loads((tmp_path / "draws.json").read_text())
    assert [row["seeds"] for row in rows] == [1] * 6 + [2] * 6
    for few, many in zip(rows[::2], rows[1::2], strict=True):
        assert (few["budget"], many["budget"]) == (8, 48)
        assert 50 < few["accuracy"] <= many["accuracy"] + 5 and many["accuracy"] > 85
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 6 and "argmax" in table[2]
