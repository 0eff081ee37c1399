"""Pieces of the figures, on small numbers worked by hand."""

import re
from html import unescape

import fake_report
import numpy as np
import pytest
from PIL import Image

from stepprune_jax.evaluation.report import square_patches
from stepprune_jax.pruning import PRUNERS
from stepprune_jax.visualize import (
    accuracy,
    animation,
    counts,
    excerpts,
    overlays,
    page,
    page_table,
    patches,
    style,
    training,
)

DASH = page_table.UNKNOWN


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return fake_report.make(tmp_path_factory.mktemp("report") / "images", 40)


def test_groups_hold_every_value_once():
    for values in (np.array([3, 3, 1]), np.arange(100), np.repeat([0, 1, 50], [90, 5, 5])):
        labels, members = excerpts.group(values, most=6)
        assert len(labels) == len(members) <= 6
        assert (np.sum(members, axis=0) == 1).all() and all(m.any() for m in members)
    assert excerpts.group(np.array([3, 3, 1]))[0] == ["1", "3"]


def test_default_and_best_other(report):
    assert excerpts.default_record(report).pruning_rate == 77.8
    adaptive, exact, other = excerpts.tightest(report)
    assert (adaptive.mode, exact.mode) == ("adaptive", "exact")
    assert {r.pruning_rate for r in (adaptive, exact, other)} == {88.9}
    rivals = [r for r in report.records if r.pruning_rate == 88.9 and r.method[:4] != "Step"]
    assert other.correct.mean() == max(r.correct.mean() for r in rivals)


def test_labels_are_spread_and_stay_in_order():
    assert style.spread([0.0, 10.0], 1.0) == [0.0, 10.0]
    assert style.spread([5.0, 5.0], 1.0) == [4.5, 5.5]
    placed = style.spread([3.0, 0.0, 3.1, 3.2], 1.0)
    assert sorted(placed) == [placed[i] for i in (1, 0, 2, 3)]
    assert np.diff(sorted(placed)).min() >= 1 - 1e-9
    assert style.spread([], 1.0) == []


def test_a_method_keeps_its_colour_and_unknown_ones_get_their_own():
    few = style.colours(["StepPrune", "causal", "last"])
    assert few["StepPrune"] == style.colours(["random"])["StepPrune"]
    assert few["causal"] != few["last"]


def test_buckets_hold_every_count():
    for count in (np.array([7]), np.array([1, 72]), np.arange(10, 20)):
        edges = counts.count_buckets(count)
        assert np.histogram(count, edges)[0].sum() == len(count) and len(edges) <= 16


def test_every_pruner_has_a_line_of_its_own_look():
    names = [kind.label for kind in PRUNERS.values()]
    palette, signs = style.colours(names), style.markers(names)
    looks = {(palette[name], signs[name]) for name in names}
    assert len(looks) == len(names) > len({palette[name] for name in names})


@pytest.mark.parametrize("method", ["StepPrune", "stop as a slot"])
def test_an_own_stop_is_a_star_in_the_colour_of_its_method(method):
    names = [method, f"{method}, own stop", "grid"]
    palette, signs = style.colours(names), style.markers(names)
    assert palette[names[0]] == palette[names[1]] != palette["grid"]
    assert signs[names[1]] == "*" and "*" not in (signs[method], signs["grid"])


def test_few_colours_keep_the_common_ones_exactly():
    pixels = np.full((64, 64, 3), 255, np.uint8)
    pixels[:8] = (245, 247, 250)
    pixels[8:16] = np.random.default_rng(0).integers(0, 256, (8, 64, 3))
    image = Image.fromarray(pixels)
    chosen = style.choose_palette(image, 32)
    few = np.asarray(style.reduce_colours(image, chosen).convert("RGB"))
    assert len(chosen) <= 32
    np.testing.assert_array_equal(few[:8], pixels[:8])
    np.testing.assert_array_equal(few[16:], pixels[16:])
    assert np.abs(few[8:16].astype(int) - pixels[8:16]).mean() < 40


def test_kept_patches_stay_and_the_rest_is_darker():
    pixels = np.full((60, 60, 3), 200, np.uint8)
    # The end of the first row and the start of the second.
    dimmed = patches.dim(pixels, patches.kept_patches([2, 3], 3))
    assert (dimmed[:20, 40:] == 200).all() and (dimmed[20:40, :20] == 200).all()
    assert (dimmed[:20, :40] < 120).all() and (dimmed[20:40, 20:] < 120).all()
    assert (dimmed[40:] < 120).all()


def test_patches_tile_any_square():
    for side, grid in ((36, 12), (50, 7), (50, 3)):
        covered = np.zeros((side, side), int)
        for token in range(grid * grid):
            left, top, right, bottom = patches.patch_box(token, grid, side)
            covered[top:bottom, left:right] += 1
            middle = patches.dim(
                np.full((side, side, 3), 255, np.uint8), patches.kept_patches([token], grid)
            )
            assert (middle[top:bottom, left:right] == 255).all()
        assert (covered == 1).all()


def test_numbers_give_way_to_dots():
    assert patches.use_numbers(72, 12, 336)
    assert not patches.use_numbers(100, 12, 336)
    assert not patches.use_numbers(5, 24, 336)


@pytest.mark.parametrize("grid", [12, 24])
def test_panel_has_the_size_asked_for(report, grid):
    panel = patches.draw_panel(report.questions[0].image, np.arange(30), grid, 240)
    assert panel.size == (240, 240)


def test_wide_pictures_are_padded_as_the_tower_sees_them(tmp_path):
    Image.new("RGB", (80, 40), "white").save(tmp_path / "wide.png")
    square = patches.read_square(tmp_path / "wide.png", 80)
    assert (square[30:50] > 250).all() and (square[:15] < 5).all() and (square[65:] < 5).all()


def test_examples_are_distinct_and_near_their_quantile(report):
    count = np.arange(40)
    few, many = overlays.choose_spread(report, count, (0.05, 0.95), 3)
    assert len({*few, *many}) == 6 and max(few) < 12 and min(many) > 27
    assert len({report.questions[i].category for i in few}) == 3
    assert len(overlays.choose(report, count, 0.5, 100)) == 40


def test_text_is_broken_to_fit():
    lines = overlays.wrap_pixels("word " * 40, 200, 14, most=2)
    assert len(lines) == 2 and lines[-1].endswith("…")
    assert all(patches.font(14).getlength(line) <= 210 for line in lines)
    assert overlays.wrap_pixels("short", 200, 14, most=2) == ["short"]
    assert len(overlays.wrap_pixels("w" * 300, 200, 14, most=2)) == 2


def test_animation_has_a_frame_for_each_patch(report, tmp_path):
    path = animation.draw_selection(tmp_path / "x.gif", report, shares=(0.1, 0.3))
    count = excerpts.default_record(report).count
    chosen = overlays.choose_spread(report, count, (0.1, 0.3))
    with Image.open(path) as image:
        assert image.n_frames == max(count[i] for (i,) in chosen) + 2
        assert image.info["loop"] == 0


def cells(report, header=False):
    """The rows of the page's table as texts."""
    rows = page_table.html_table(report).split("<tr")[1:]
    texts = [[re.sub("<.*?>", "", cell) for cell in re.findall("<t[hd].*?</t", r)] for r in rows]
    return [[unescape(text.removesuffix("</t")) for text in row] for row in texts]


def test_table_has_a_block_for_each_budget(report):
    head, first, second, block, *rest = cells(report)
    assert head == ["method", "K", "retention %", "accuracy %", "time ms", "GFLOPs"]
    assert first[:3] == ["all tokens", "144.0", "100.0"]
    assert second[0] == "StepPrune, own stop"
    assert block == ["48 of 144 tokens 66.7 % pruned"] and len(rest[0]) == len(head)
    names = [row[0] for row in rest if len(row) == 1]
    assert names == ["32 of 144 tokens 77.8 % pruned", "16 of 144 tokens 88.9 % pruned"]
    row = next(r for r in report.table if (r["method"], r["mode"]) == ("random", "exact"))
    assert rest[0][0] == "random" and "StepPrune adaptive" in [row[0] for row in rest]
    assert rest[0][4:] == [f"{row['ms']:.2f}", f"{row['gflops']:.3f}"]


def test_no_row_is_left_out(report):
    whole = report.table[0] | {"method": "grid"}  # a budget of all tokens
    names = [row[0] for row in cells(report._replace(table=[*report.table, whole]))]
    assert names[1:4] == ["all tokens", "StepPrune, own stop", "grid"]
    assert len(names) == 1 + len(report.table) + 1 + 3  # header, rows, budgets


def test_operations_are_in_a_unit_that_suits_them(report):
    for scale, unit, shown in (
        (1e4, "TFLOPs", "5.38"),
        (1e-3, "MFLOPs", "0.538"),
        (1e-4, "FLOPs", "53800"),
    ):
        rows = [row | {"gflops": row["gflops"] * scale} for row in report.table]
        head, first, *_ = cells(report._replace(table=rows))
        assert (head[-1], first[-1]) == (unit, shown)


def test_what_is_not_known_is_a_dash(report):
    unknown = {"ms": None, "gflops": None}
    rows = [row | (unknown if row["mode"] == "exact" else {}) for row in report.table]
    head, first, second, *_ = cells(report._replace(table=rows))
    assert first[-2:] == [DASH, DASH] and DASH not in second and head[-1] == "GFLOPs"
    rows = [{k: v for k, v in row.items() if k not in unknown} for row in report.table]
    head, first, second, *_ = cells(report._replace(table=rows))
    assert head[-1] == "FLOPs" and first[-2:] == second[-2:] == [DASH, DASH]


def test_table_marks_the_best_of_each_budget(report):
    text = page_table.html_table(report)
    assert page_table.budgets(report) == {66.7: 48, 77.8: 32, 88.9: 16}
    for rate in page_table.budgets(report):
        best = max(r["retention"] for r in report.table if r["pruning_rate"] == rate)
        assert f"<b>{best:.1f}</b>" in text
    assert len(re.findall("<b>", text)) >= 3 and "own stop" in text


def test_a_model_that_gets_nothing_right_has_no_retention(report, tmp_path):
    nothing = [row | {"retention": None} for row in report.table]
    changed = excerpts.check_report(report._replace(table=nothing))
    assert "<b>" not in page_table.html_table(changed)
    assert DASH in page_table.html_table(changed)
    assert accuracy.draw_accuracy(tmp_path / "a.png", changed.table, 16).stat().st_size > 1000
    assert accuracy.draw_costs(tmp_path / "b.png", changed.table).stat().st_size > 1000


def test_a_long_name_makes_room_for_itself(report, tmp_path):
    def width(name):
        rows = [r | {"method": name} if r["method"] == "grid" else r for r in report.table]
        with Image.open(accuracy.draw_accuracy(tmp_path / "a.png", rows, 16)) as image:
            return image.width

    assert width("grid") == width("a name of 24 characters.") == 7 * style.DPI
    assert width("StepPrune, learning rates x 2, own stop") > 7 * style.DPI


def test_costs_are_drawn_where_the_table_knows_them(report, tmp_path):
    def drawn(*unknown):
        rows = [{k: v for k, v in row.items() if k not in unknown} for row in report.table]
        return accuracy.draw_costs(tmp_path / "c.png", rows)

    assert drawn("ms", "gflops") is None and not (tmp_path / "c.png").exists()
    alone = drawn("ms").read_bytes()
    assert drawn().read_bytes() != alone
    unknown = [row | {"ms": None} for row in report.table[:3]] + report.table[3:]
    assert accuracy.draw_costs(tmp_path / "u.png", unknown).exists()


def test_a_policy_may_keep_nothing_or_never_stop(report, tmp_path):
    exact = [r for r in report.records if r.mode == "exact"]
    nothing = [
        r._replace(count=np.zeros(40, int), order=np.full_like(r.order, -1))
        if r.method == "StepPrune"
        else r
        for r in exact
    ]
    changed = report._replace(records=nothing, table=fake_report.rows(nothing))
    assert excerpts.default_record(excerpts.check_report(changed)).mode == "exact"
    assert accuracy.draw_accuracy(tmp_path / "a.png", changed.table, 16).exists()
    assert counts.draw_histogram(tmp_path / "h.png", changed).exists()
    assert counts.draw_complexity(tmp_path / "c.png", changed).exists()
    assert overlays.draw_hero(tmp_path / "o.png", changed).exists()
    with Image.open(animation.draw_selection(tmp_path / "s.gif", changed)) as image:
        assert image.n_frames <= 2
    told = dict(page.describe(changed))
    assert told["Spearman's rank correlation of K"] == "K does not vary"


def test_patches_in_the_padded_square_by_hand():
    # Two rows of three patches behind a class token, at the top of the square; -1: merged.
    assert square_patches([1, 4, 0, 6, -1], (2, 3), 1).tolist() == [0, 3, 5]
    assert square_patches([2, 0], (3, 1), 0).tolist() == [7, 1]  # a column, in the middle


def test_the_class_token_has_no_patch(report):
    shifted = []
    for r in report.records:
        later = np.where(r.order < 0, -1, r.order + 1)
        order = np.concatenate([np.zeros((40, 1), int), later], axis=1)
        shifted.append(r._replace(num_tokens=145, count=r.count + 1, order=order))
    changed = excerpts.check_report(report._replace(records=shifted))
    before, after = excerpts.default_record(report), excerpts.default_record(changed)
    assert (report.first(3), changed.first(3)) == (0, 1)
    for i in range(5):
        np.testing.assert_array_equal(changed.patches(after, i), report.patches(before, i))


def test_curves_tolerate_missing_keys(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0, "note": "x"}\n\n{"step": 2, "loss": NaN, "iou": 1}\n')
    metrics = training.read_metrics(file)
    assert set(metrics) == {"step", "loss", "iou"}
    np.testing.assert_array_equal(metrics["iou"], [np.nan, 1])
    assert training.draw_training(tmp_path / "t.png", file).stat().st_size > 1000


def test_running_mean_by_hand():
    np.testing.assert_allclose(training.running_mean(np.array([0.0, 3, 6]), 1), [1.5, 3, 4.5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\n{"ste', "metrics.jsonl: line 2, column"),
        ('{"loss": 1}\n', "line 1: expected an object with a number 'step'"),
        ("", "got an empty file"),
        ('{"step": true}\n', "line 1: expected an object with a number 'step'"),
    ],
)
def test_bad_metrics_are_named(tmp_path, text, message):
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        training.read_metrics(file)
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        training.read_metrics(tmp_path / "gone.jsonl")


def test_metrics_without_a_known_key_are_refused(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "other": 2}\n')
    with pytest.raises(ValueError, match="none of these keys"):
        training.draw_training(tmp_path / "t.png", file)


def broken(report, **changes):
    """The report with its second record changed."""
    records = list(report.records)
    records[1] = records[1]._replace(**changes)
    return report._replace(records=records)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s._replace(records=[]), "records: expected at least one"),
        (lambda s: s._replace(table=[]), "table: expected at least one"),
        (lambda s: s._replace(answers=s.answers[:-1]), "answers: expected 40, one per question"),
        (lambda s: s._replace(scenes=s.scenes[:2]), "scenes: expected 40"),
        (lambda s: s._replace(grids=[(0, 12)] * 40), r"grids\[0\]: 0 x 12"),
        (lambda s: s._replace(table=[{"method": "x"}]), r"table\[0\]: field 'mode'"),
        (lambda s: s._replace(records=s.records[1:]), "'all tokens'"),
        (lambda s: s._replace(records=s.records[:1]), "none has the method 'StepPrune'"),
        (lambda s: broken(s, answer=["x"]), r"records\[1\] \(random.*'answer' has 1 entries"),
        (lambda s: broken(s, count=np.full(40, 99)), r"count\[0\] is 99, expected 0 to 72"),
        (lambda s: s._replace(grids=[(2, 2)] * 40), "2 x 2 patches do not make 144 tokens"),
    ],
)
def test_parts_that_do_not_fit_are_named(report, change, message):
    with pytest.raises(ValueError, match=message):
        excerpts.check_report(change(report))


def test_a_token_after_the_count_is_named(report):
    order = report.records[1].order.copy()
    order[3, -1] = 7
    with pytest.raises(ValueError, match=r"order\[3, 71\] is 7, expected -1"):
        excerpts.check_report(broken(report, order=order))


def test_merged_tokens_come_last(report):
    order = report.records[1].order.copy()
    kept = int(report.records[1].count[3])
    order[3, kept - 5 : kept] = -1
    excerpts.check_report(broken(report, order=order))
    order[3, kept - 1] = 7
    with pytest.raises(ValueError, match=rf"order\[3, {kept - 2}\] is -1, expected a token from 0"):
        excerpts.check_report(broken(report, order=order))


def test_the_table_names_the_budget_itself(report):
    # 640 of 2,880 tokens are 77.8 % pruned, of which 639.4 would be computed back.
    rows = [row | {"mean_k": 640.0} for row in report.table if row["pruning_rate"] == 77.8]
    whole = report.records[0]._replace(count=np.full(40, 2880))
    records = [whole, *report.records[1:]]
    changed = report._replace(table=[report.table[0], *rows], records=records)
    assert ["640 of 2,880 tokens 77.8 % pruned"] in cells(changed)
