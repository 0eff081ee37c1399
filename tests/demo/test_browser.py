"""The page in a headless browser: upload, ask, move the slider, read the answer."""

import re
import shutil
import subprocess
import sys
import time
import urllib.request

import pytest
from processes import free_port

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
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
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
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"nothing at {address}")


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
        times = re.compile(r"first token after [\d.]+ ms")
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


def test_a_mistake_is_shown(page):
    page.get_by_label("question").fill(" ")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("the question is empty").wait_for()
