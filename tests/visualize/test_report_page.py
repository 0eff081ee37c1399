"""The whole report: its files, its page, its promises."""

import html.parser
import json

import fake_report
import pytest
from PIL import Image

from stepprune_jax.visualize import write_report

VOID = {"meta", "img", "br"}
FILES = {
    "accuracy.png",
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
        self.images, self.text, self.open, self.tags = [], [], [], set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attrs))
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
    report.questions[0] = report.questions[0]._replace(category="<b>&\"'$x$")
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
    assert not {"script", "link", "iframe", "i", "s"} & parsed.tags
    assert "http" not in page.read_text()
    words = "".join(parsed.text)
    for given in ("A <i>title</i>", "eval.py --x='<s>'", "steps: 5 # <script>"):
        assert given in words


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
