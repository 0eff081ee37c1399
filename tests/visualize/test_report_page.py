"""The whole report: its files, its page, its promises."""

import html.parser
import json

import fake_report
import pytest
from PIL import Image

from stepprune_jax.visualize import write_report
from stepprune_jax.visualize.excerpts import tightest
from stepprune_jax.visualize.opening import opening
from stepprune_jax.visualize.page_table import UNKNOWN, html_table

VOID = {"meta", "img", "br"}
FILES = {
    "accuracy.png",
    "cost.png",
    "families.png",
    "k_histogram.png",
    "k_complexity.png",
    "overlays.png",
    "overlay_hero.png",
    "selection.gif",
    "training.png",
    "index.html",
}


class Page(html.parser.HTMLParser):
    """Collects images and text, and notes tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.images, self.text, self.open, self.tags, self.links = [], [], [], set(), []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attrs))
            assert self.open[-1] == "a" and self.links[-1] == dict(attrs)["src"]  # full size
        if tag == "a":
            self.links.append(dict(attrs)["href"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    report = fake_report.make(folder / "images", 30)
    report.questions[0] = report.questions[0]._replace(category="<b>&\"'$x$", text="A <q>dog</q>?")
    for row, record in enumerate(report.records):
        if record.method == "grid":
            report.records[row] = record._replace(method="<u>grid</u>")
            report.table[row]["method"] = "<u>grid</u>"
    report = report._replace(model="<em>tiny</em>", ask="ask --prompt '<q>'")
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in fake_report.metrics(50)))
    page = write_report(
        folder / "report",
        report._replace(metrics_file=metrics),
        title="A <i>title</i>",
        command="eval.py --x='<s>'",
        config="steps: 5 # <script>",
    )
    return report, metrics, page


def test_every_file_is_there_small_and_readable(made):
    *_, page = made
    assert {file.name for file in page.parent.iterdir()} == FILES
    for file in page.parent.iterdir():
        if file.suffix != ".html":
            with Image.open(file) as image:
                image.load()
                assert image.width >= 600 and image.height >= 300
            assert file.stat().st_size <= (400_000 if file.suffix == ".gif" else 120_000)


def test_page_is_well_formed_and_shows_every_figure(made):
    *_, page = made
    text = page.read_text()
    parsed = Page(text)
    assert text.startswith("<!DOCTYPE html>") and parsed.open == []
    assert {i["src"] for i in parsed.images} == FILES - {"index.html", "overlay_hero.png"}
    for image in parsed.images:
        assert len(image["alt"]) > 20
        with Image.open(page.parent / image["src"]) as file:
            scale = 1 if image["src"].endswith(".gif") else 2
            assert abs(file.width - scale * int(image["width"])) <= 1


def test_page_needs_no_network_and_escapes_what_it_is_given(made):
    *_, page = made
    parsed = Page(page.read_text())
    assert not {"script", "link", "iframe", "i", "s", "u", "q", "em"} & parsed.tags
    assert "http" not in page.read_text()
    words = "".join(parsed.text)
    given = ["A <i>title</i>", "eval.py --x='<s>'", "steps: 5 # <script>", "A <q>dog</q>?"]
    for text in [*given, "<u>grid</u>", "<em>tiny</em>", "ask --prompt '<q>'"]:
        assert text in words


def test_page_opens_with_what_was_asked_and_the_two_figures(made):
    report, _, page = made
    opening = " ".join("".join(Page(page.read_text()).text).partition("All methods")[0].split())
    assert "30 questions about 10 images" in opening and "<em>tiny</em>" in opening
    assert "K is the number of them that the language model reads" in opening
    own = next(row for row in report.table if row["method"] == "StepPrune, own stop")
    assert f"{own['mean_k']:.1f} of 144 tokens" in opening
    assert f"{own['retention']:.1f} % retention" in opening
    adaptive, exact, best = (
        next(r for r in report.table if (r["method"], r["mode"], r["pruning_rate"]) == row)
        for row in [(r.method, r.mode, r.pruning_rate) for r in tightest(report)]
    )
    assert "At the tightest budget: 16 of 144 tokens" in opening
    assert f"{adaptive['retention']:.1f} % retention with StepPrune, adaptive" in opening
    assert f"{best['retention']:.1f} % with {best['method']}, the best other method" in opening
    assert (
        f"With exactly 16 tokens for every image, StepPrune retains {exact['retention']:.1f} %."
        in opening
    )


def test_page_fits_phones_and_dark_rooms(made):
    text = made[-1].read_text()
    assert "width=device-width" in text and "prefers-color-scheme: dark" in text
    assert "max-width: 600px" in text


def test_page_goes_without_what_is_not_known(made, tmp_path):
    report, *_ = made
    kept = [n for n, r in enumerate(report.records) if r.method in ("all tokens", "StepPrune")]
    lacking = ("ms", "gflops")
    table = [{k: v for k, v in report.table[n].items() if k not in lacking} for n in kept]
    records = [report.records[n] for n in kept]
    old = report._replace(table=table, records=records, scenes=None, model="", ask="")
    words = "".join(Page(opening(old) + html_table(old)).text)
    assert "stops by itself" not in words and "other method" not in words
    assert "answered by the model" in words and "ms" in words and UNKNOWN in words


def test_again_without_scenes_and_metrics(made, tmp_path):
    report, _, page = made
    again = write_report(tmp_path, report._replace(scenes=None))
    assert not (tmp_path / "training.png").exists()
    assert "training.png" not in again.read_text() and "Spearman" not in again.read_text()
    for name in FILES - {"training.png", "k_complexity.png", "index.html"}:
        assert (tmp_path / name).read_bytes() == (page.parent / name).read_bytes(), name


def test_missing_or_broken_picture_is_named(made, tmp_path):
    report, *_ = made
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    for path, error in ((tmp_path / "gone.png", FileNotFoundError), (broken, ValueError)):
        questions = [q._replace(image=path) for q in report.questions]
        with pytest.raises(error, match=path.name):
            write_report(tmp_path / "r", report._replace(questions=questions, scenes=None))
