"""The report in a real browser, wherever a Chromium is installed; .ci/run installs one where it can."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.reporting.rendering import write_report
from experiments.reporting.report import report_of
from experiments.runs.reading import read_run
from tests.experiments.reporting.browser import Browser, installed
from tests.experiments.reporting.recorded import everything, record

PROGRAM = installed()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")

PHONE, DESK = 390, 1280


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = record(tmp_path_factory.mktemp("runs") / "mine", everything())
    return write_report(report_of(read_run(folder)), folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as running:
        yield running


def complaints(browser: Browser) -> list[str]:
    """Errors and warnings of the console, exceptions, and whatever was asked of a network."""
    found = [str(event["entry"]) for event in browser.of("Log.entryAdded")]
    found += [str(event) for event in browser.of("Runtime.exceptionThrown", "Runtime.consoleAPICalled")]
    asked = [event["request"]["url"] for event in browser.of("Network.requestWillBeSent")]
    return found + [url for url in asked if not url.startswith("file://") or not url.endswith(("report.html", ".svg"))]


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("dark", [False, True])
def test_it_opens_without_a_complaint_and_fits(report: Path, browser: Browser, width: int, dark: bool) -> None:
    browser.open(report, width, dark=dark)
    assert complaints(browser) == []
    assert len(browser.of("Network.requestWillBeSent")) == 1
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("document.scripts.length + document.images.length") == 0
    sizes = "[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect())"
    assert browser.value(f"{sizes}.length") == 10
    assert browser.value(f"{sizes}.filter(b => b.width < 250 || b.height < 80 || b.right > innerWidth).length") == 0
    # Whatever is wider than its column scrolls there, and nothing else.
    outside = (
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg') &&"
        " e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + e.className)"
    )
    assert browser.value(outside) == []


def test_light_and_dark_are_two_themes_pictures_included(report: Path, browser: Browser) -> None:
    seen = []
    for dark in (False, True):
        browser.open(report, DESK, dark=dark)
        ink = browser.value("getComputedStyle(document.body).color")
        paper = browser.value("getComputedStyle(document.body).backgroundColor")
        label = browser.value("getComputedStyle(document.querySelector('figure svg text')).fill")
        dots = "[...document.querySelectorAll('figure svg use')].map(e => getComputedStyle(e).fill)"
        seen.append((ink, paper, label, browser.value(f"{dots}[0]")))
    for light, dark in zip(*seen, strict=True):
        assert light != dark
    assert all("rgb" in str(colour) for colours in seen for colour in colours)


def test_it_prints_in_the_light_theme_on_pages_that_hold_it(report: Path, browser: Browser, tmp_path: Path) -> None:
    browser.open(report, 700, dark=True, media="print")
    assert browser.value("getComputedStyle(document.body).color") == "rgb(29, 29, 27)"
    assert browser.value("document.documentElement.scrollWidth") <= 700
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_picture_of_its_own_is_light_or_dark_as_wished(report: Path, browser: Browser) -> None:
    seen = []
    for dark in (False, True):
        browser.open(report.parent / "figures" / "throughput.svg", DESK, dark=dark)
        assert complaints(browser) == []
        seen.append(browser.value("getComputedStyle(document.querySelector('text')).fill"))
    assert seen[0] != seen[1]


def test_markup_in_a_run_does_nothing(report: Path, browser: Browser) -> None:
    browser.open(report, DESK)
    assert browser.of("Page.javascriptDialogOpening") == []
    assert browser.value("document.body.innerText.includes('<script>alert(\"1\")</script>')") is True


def test_the_browser_does_complain_of_what_is_wrong(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "report.html"
    bad.write_text(
        "<!DOCTYPE html><meta name=viewport content='width=device-width'><div style='width:900px'>wide</div>"
        "<img src='http://127.0.0.1:9/x.png'><script>throw new Error('no')</script>"
    )
    browser.open(bad, PHONE)
    found = " ".join(complaints(browser))
    assert "x.png" in found
    assert "Error: no" in found
    assert browser.value("document.documentElement.scrollWidth") > PHONE
