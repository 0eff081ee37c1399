"""The page in a headless browser: upload, ask, move the slider, read the answer."""

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest
import shapes_oracle
import stand_ins
from processes import free_port

from experiments.shapes import scene_at
from stepprune_jax.demo.examples import shapes_examples

pytestmark = pytest.mark.slow
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pytest.importorskip("gradio", reason="the page needs Gradio: pip install '.[demo]'")
    api = pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    port = free_port()
    command = [sys.executable, "-m", "stepprune_jax.cli.demo", "--port", str(port)]
    log = tmp_path_factory.mktemp("server") / "log"
    quiet = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=quiet)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, server, log)
        with api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.set_default_timeout(300_000)  # the first answer compiles
            page.goto(address)
            yield page
            browser.close()
    finally:
        server.terminate()
        server.wait(20)


def wait_for(address, server, log):
    for _ in range(1200):  # a busy machine takes minutes
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"nothing at {address}: {log.read_text()}")


def kept(page):
    """Tokens that were kept, of how many, as the page says."""
    text = page.locator("#pruned").inner_text()
    return tuple(map(int, re.search(r"kept tokens: (\d+) of (\d+)", text).groups()))


def test_upload_ask_and_move_the_slider(page, tmp_path):
    assert page.get_by_label("method").input_value() == "stepprune (shapes)"
    image, question = shapes_examples()[2]
    image.save(tmp_path / "scene.png")
    page.locator("input[type=file]").first.set_input_files(tmp_path / "scene.png")
    page.get_by_label("question").fill(question)
    page.get_by_role("button", name="Ask").click()
    for name in ("full", "pruned"):
        times = re.compile(r"first token after [\d.]+ m?s")
        page.locator(f"#{name}").get_by_text(times).wait_for()
        assert page.locator(f"#{name} textarea").input_value().strip()
    assert "all tokens: 144 of 144" in page.locator("#full").inner_text()
    own, everything = kept(page)
    assert 1 <= own <= 72 and everything == 144
    page.locator("#picture img").wait_for()

    page.get_by_label("exactly").check()
    slider = page.locator("input[type=range]")
    slider.wait_for()
    slider.focus()
    before = int(slider.input_value())
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert int(slider.input_value()) == before + 3
    page.get_by_role("button", name="Ask").click()
    page.locator("#pruned").get_by_text(f"kept tokens: {before + 3} of 144").wait_for()


def test_the_first_example_is_answered_right(page):
    """The page opens with an example of the package, and its scene has the answer."""
    scene, _ = scene_at(2026, "test", 0)
    page.reload()
    question = page.get_by_label("question").input_value()
    page.get_by_role("button", name="Ask").click()
    page.locator("#pruned").get_by_text(re.compile(r"first token after")).wait_for()
    for name in ("full", "pruned"):
        answer = page.locator(f"#{name} textarea").input_value()
        assert answer == shapes_oracle.answer(scene, question)[1]


def test_the_signatures_are_those_of_gradio(page):
    assert stand_ins.changed_signatures("gradio") == []


def test_a_mistake_is_shown(page):
    page.get_by_label("question").fill(" ")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("the question is empty").wait_for()
