"""The page in a headless browser: a user uploads, asks, and moves the slider."""

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
    reason = "a browser is driven by playwright"
    playwright_api = pytest.importorskip("playwright.sync_api", reason=reason)
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    port = free_port()
    command = [sys.executable, "-m", "stepprune_jax.cli.demo", "--port", str(port)]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, server, log)
        with playwright_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.set_default_timeout(300_000)  # The first answer compiles.
            page.goto(address)
            yield page
            browser.close()
    finally:
        server.terminate()
        server.wait(20)


def wait_for(address, server, log):
    for _ in range(1200):  # A busy machine takes minutes.
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"nothing at {address}: {log.read_text()}")


def read_counts(page):
    """Returns the numbers of kept tokens and of all tokens on the page."""
    text = page.locator("#pruned").inner_text()
    return tuple(map(int, re.search(r"kept tokens: (\d+) of (\d+)", text).groups()))


def test_a_user_uploads_asks_and_moves_the_slider(page, tmp_path):
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
    num_kept, num_tokens = read_counts(page)
    assert 1 <= num_kept <= 72 and num_tokens == 144
    page.locator("#picture img").wait_for()

    page.get_by_label("exactly").check()
    slider = page.locator("input[type=range]")
    slider.wait_for()
    slider.focus()
    start_count = int(slider.input_value())
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert int(slider.input_value()) == start_count + 3
    page.get_by_role("button", name="Ask").click()
    page.locator("#pruned").get_by_text(f"kept tokens: {start_count + 3} of 144").wait_for()


def test_the_first_example_is_answered_correctly(page):
    """The page opens with an example of the package, whose scene has the correct answer."""
    scene, _ = scene_at(2026, "test", 0)
    page.reload()
    question = page.get_by_label("question").input_value()
    page.get_by_role("button", name="Ask").click()
    page.locator("#pruned").get_by_text(re.compile(r"first token after")).wait_for()
    for name in ("full", "pruned"):
        answer = page.locator(f"#{name} textarea").input_value()
        assert answer == shapes_oracle.answer(scene, question)[1]


def test_gradio_has_the_recorded_signatures(page):
    assert stand_ins.changed_signatures("gradio") == []


def test_the_page_shows_a_user_error(page):
    page.get_by_label("question").fill(" ")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("the question is empty").wait_for()
