"""Pages in a real Chromium: nothing is asked of the network, nothing is logged, and what a reader does works.

Skipped where Chromium or playwright is missing. With REALHF_SCREENSHOTS=DIR, pictures of the pages are kept.
"""

import os
import shutil
from pathlib import Path

import pytest

from realhf.report.run_data import RunFiles
from realhf.report.run_page import run_page
from tests.cli_tools import wait_until
from tests.report.synthetic import make_run

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
SCREENSHOTS = os.environ.get("REALHF_SCREENSHOTS")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open a file, at a width; what it asks the network for and what it logs are faults."""
    faults: list[str] = []
    contexts = []

    def opened(path: Path, *, width: int = 1280, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: faults.append(request.url) if not request.url.startswith(
            ("file:", "data:", "blob:")) else None)
        page.on("console", lambda message: faults.append(message.text) if message.type in (
            "error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(path.absolute().as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture(scope="module")
def page_of_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page")
    path = make_run(directory / "grpo", steps=60, ranks=8)
    run_page(RunFiles(path)).save(directory / "report.html")
    return directory / "report.html"


def bars(page, axis: str = "y") -> set[str]:
    """Return the ranks that the timeline shows."""
    return set(page.evaluate(
        "axis => document.querySelectorAll('.of-step')[0].data.filter(t => (t.yaxis || 'y') === axis)"
        ".flatMap(t => [...t.y])", axis))


def keep(page, name: str, *, section: str | None = None, height: int = 1250) -> None:
    """Keep a picture of the top of a page, or of the page from a section on."""
    if SCREENSHOTS:
        page.set_viewport_size(page.viewport_size | {"height": height})
        if section is not None:
            page.evaluate("id => document.getElementById(id).scrollIntoView({behavior: 'instant'})", section)
        page.wait_for_timeout(500)
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


def until(page, condition: str, *, seconds: float = 30) -> None:
    """Wait for a condition. (The page's policy forbids playwright's own way, which evaluates texts.)"""
    assert wait_until(lambda: page.evaluate(condition), seconds=seconds), condition


def scroll_through(page) -> None:
    """Let all figures be drawn."""
    position = 0
    while position < page.evaluate("document.body.scrollHeight"):
        page.evaluate(f"scrollTo(0, {position})")
        page.wait_for_timeout(60)
        position += 600
    page.evaluate("scrollTo(0, 0)")


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_all_figures_are_drawn_and_nothing_is_wider_than_the_screen(open_page, page_of_run, width, scheme):
    page = open_page(page_of_run, width=width, scheme=scheme)
    scroll_through(page)
    until(page, "[...document.querySelectorAll('.plot')].every(node => node.querySelector('svg'))")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    keep(page, f"report-{width}", section="step" if width < 600 else None)


def test_the_timeline_zooms_and_shows_the_ranks_that_are_named(open_page, page_of_run):
    page = open_page(page_of_run)
    page.locator("#step").scroll_into_view_if_needed()
    page.wait_for_selector("#step .of-step svg.main-svg")
    assert bars(page) == {str(rank) for rank in range(8)} == bars(page, "y2")
    page.fill("#step input.ranks", "0-1, 5")
    until(page, "document.querySelectorAll('.of-step')[0].layout.yaxis.categoryarray.length === 3")
    assert bars(page) == {"0", "1", "5"} == bars(page, "y2")
    before = page.evaluate("document.querySelectorAll('.of-step')[0].layout.xaxis.range")
    box = page.locator("#step .of-step").first.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 5, steps=5)
    page.mouse.up()
    page.wait_for_timeout(300)
    after = page.evaluate("document.querySelectorAll('.of-step')[0].layout.xaxis.range")
    width = before[1] - before[0]
    assert after[1] - after[0] == pytest.approx(0.3 * width, rel=0.1)
    assert after[0] - before[0] == pytest.approx(0.3 * width, rel=0.1)
    page.fill("#step input.ranks", "")
    page.select_option("#step select.step", index=1)
    until(page, "document.querySelectorAll('.of-step')[0].layout.yaxis.categoryarray.length === 8")


def test_curves_are_smoothed(open_page, page_of_run):
    page = open_page(page_of_run)
    page.locator("#curves").scroll_into_view_if_needed()
    page.wait_for_selector("#curves .plot svg.main-svg")
    values = "document.querySelector('#curves .plot').data.find(t => t.meta && t.meta.smooth).y"
    page.evaluate("const s = document.querySelector('#curves .smoothing'); s.value = 0; s.oninput()")
    raw = page.evaluate(values)
    page.evaluate("const s = document.querySelector('#curves .smoothing'); s.value = 0.9; s.oninput()")
    expected, total, count = [], 0.0, 0.0
    for value in raw:
        total, count = 0.9 * total + 0.1 * value, 0.9 * count + 0.1
        expected.append(total / count)
    assert page.evaluate(values) == pytest.approx(expected)


def test_rollouts_are_filtered_and_tokens_coloured_turn_by_turn(open_page, page_of_run):
    page = open_page(page_of_run)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.wait_for_selector(".samples .sample")
    count = page.locator(".samples .count")
    assert count.inner_text() == "480 of 480 rollouts in this page match."
    page.fill(".samples .low", "0.5")
    assert count.inner_text().startswith("240 of 480")
    page.select_option(".samples .stop", "cut off")
    assert count.inner_text().startswith("60 of 480")
    page.select_option(".samples .of-step", "3")
    assert count.inner_text().startswith("1 of 480")
    page.fill(".samples .words", "nothing like this")
    assert count.inner_text().startswith("0 of 480")
    page.fill(".samples .words", "")
    sample = page.locator(".sample").first
    assert sample.locator(".turn").count() == 4
    assert sample.locator(".role").all_inner_texts() == ["prompt", "model", "environment", "model"]
    page.select_option(".samples .colour", "advantages")
    tints = sample.locator(".token").evaluate_all("nodes => nodes.map(node => node.style.background)")
    assert [bool(tint) for tint in tints] == [False, False, True, True, False, False, True, True]
    assert "--good" in tints[2] and "--bad" in tints[3]


def test_a_watched_page_loads_itself_again_and_keeps_its_place(open_page, tmp_path):
    path = make_run(tmp_path / "run", steps=5, finished=False)
    run_page(RunFiles(path), refresh_seconds=4).save(tmp_path / "report.html")
    page = open_page(tmp_path / "report.html")
    page.fill("#step input.ranks", "2")
    page.locator("h1").click()
    page.evaluate("document.activeElement.blur(); scrollTo(0, 700)")
    make_run(path, steps=9, finished=True)
    run_page(RunFiles(path)).save(tmp_path / "report.html")
    page.wait_for_selector("text=9 steps, 4 ranks")
    page.wait_for_selector("#step input.ranks")
    until(page, "scrollY > 400")
    assert page.input_value("#step input.ranks") == "2"


@pytest.mark.slow
def test_a_large_run_opens_quickly(open_page, tmp_path):
    path = make_run(tmp_path / "large", steps=1000, ranks=64, rollouts_per_step=100)
    run_page(RunFiles(path)).save(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 30e6
    page = open_page(tmp_path / "report.html")
    page.wait_for_selector("#curves .plot svg.main-svg")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.reload()
    page.wait_for_selector("#curves .plot svg.main-svg")
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    assert found["ProcessTime"] / 2 < 3, "seconds of the CPU, as other processes may use it, too"
