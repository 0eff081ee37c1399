"""The page in a headless browser: upload, ask, move the slider, read the answer."""

import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from stepprune_jax.demo.examples import shapes_examples

pytestmark = pytest.mark.slow
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pytest.importorskip("gradio", reason="the page needs Gradio: pip install '.[demo]'")
    api = pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "stepprune_jax.demo", "--port", str(port)]
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
    title = page.locator("#answer-pruned h3").inner_text()
    return tuple(map(int, re.search(r"(\d+) of (\d+)", title).groups()))


def test_upload_ask_and_move_the_slider(page, tmp_path):
    assert page.get_by_label("method").input_value() == "stepprune (shapes)"
    example = shapes_examples()[2]
    example.image.save(tmp_path / "scene.png")
    page.locator("input[type=file]").first.set_input_files(tmp_path / "scene.png")
    page.get_by_label("question").fill(example.question)
    page.get_by_role("button", name="Ask").click()
    page.locator("#answer-pruned p").wait_for()
    assert page.locator("#answer-full h3").inner_text() == "all tokens: 144 of 144"
    for name in ("full", "pruned"):
        assert page.locator(f"#answer-{name} p").inner_text().strip()
        times = page.locator(f"#answer-{name} small").inner_text()
        assert re.fullmatch(r"first token after [\d.]+ ms", times)
    own, everything = kept(page)
    assert 1 <= own <= 72 and everything == 144
    assert page.locator(".kept title").count() == own

    page.get_by_label("exactly").check()
    slider = page.locator("input[type=range]")
    slider.wait_for()
    slider.focus()
    before = int(slider.input_value())
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert int(slider.input_value()) == before + 3
    page.get_by_role("button", name="Ask").click()
    page.locator("#answer-pruned h3", has_text=f"{before + 3} of 144").wait_for()
    titles = page.locator(".kept title").all_text_contents()
    assert titles == [f"step {n} of {before + 3}" for n in range(1, before + 4)]
    assert page.locator(".kept g").first.is_visible()


def test_a_mistake_is_shown(page):
    page.get_by_label("question").fill(" ")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("the question is empty").wait_for()
