from decimal import Decimal

import pytest

from experiments.studies.paper_tables import PrintedRow, follows, main


# 50.0 / 100.0 may be anything from 49.95/100.05 to 50.05/99.95, that is 49.925 to 50.075: what is
# printed with one decimal can be 49.9 (to 49.95), 50.0 or 50.1 (from 50.05). 50 says less.
@pytest.mark.parametrize(
    ("average", "yes"),
    [("49.8", False), ("49.9", True), ("50.1", True), ("50.2", False), ("50", True), ("49", False)],
)
def test_a_figure_follows_if_some_rounding_gives_it(average, yes):
    row = PrintedRow("any", [Decimal("50.0")], Decimal(average))
    assert follows(row, [Decimal("100.0")]) is yes


def test_the_averages_that_do_not_follow(tmp_path):
    main(["--out", str(tmp_path / "tables.md")])
    found = (tmp_path / "tables.md").read_text()
    wrong = ["PDrop at 192", "FastV at 128", "SparseVLM at 128", "PDrop at 128"]
    wrong += ["FastV at 64", "SparseVLM at 64", "PDrop at 64"]
    assert f"do not follow: {' tokens, '.join(wrong)} tokens." in found
    assert "All 9 printed averages follow." in found
