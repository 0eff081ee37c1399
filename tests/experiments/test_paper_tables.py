from decimal import Decimal

import pytest

from experiments.studies.paper_tables import PrintedRow, follows, read_paper


def decimals(*values):
    return [Decimal(value) for value in values]


@pytest.mark.parametrize(
    "average, yes",
    [
        # 50.0 / 100.0 may be anything from 49.95/100.05 to 50.05/99.95, that is 49.925 to 50.075:
        # what is printed with one decimal can be 49.9 (to 49.95), 50.0 or 50.1 (from 50.05).
        ("49.8", False),
        ("49.9", True),
        ("50.0", True),
        ("50.1", True),
        ("50.2", False),
        # A figure without decimals says less.
        ("50", True),
        ("49", False),
    ],
)
def test_a_figure_follows_if_some_rounding_gives_it(average, yes):
    row = PrintedRow("any", decimals("50.0"), Decimal(average))
    assert follows(row, decimals("100.0")) is yes


def test_the_averages_that_do_not_follow():
    llava, qwen = read_paper()["retention"]
    found = {
        (label.split()[0], row.method)
        for label, block in llava.blocks.items()
        for row in block
        if not follows(row, llava.upper_bound)
    }
    assert found == {
        ("192", "PDrop"),
        ("128", "FastV"),
        ("128", "SparseVLM"),
        ("128", "PDrop"),
        ("64", "FastV"),
        ("64", "SparseVLM"),
        ("64", "PDrop"),
    }
    assert all(follows(row, qwen.upper_bound) for block in qwen.blocks.values() for row in block)
