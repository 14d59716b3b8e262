"""The page in a real browser, as a phone, a screen and a printer show it."""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from tests.benchmarks.show.chromium import CHROMIUM, Chromium
from tests.benchmarks.show.test_page import HOSTILE

from orinbench.judge.schema import Record
from orinbench.show.html_page import write_report

browser_there = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")
PHONE, SCREEN = 360, 1280
BODY = "getComputedStyle(document.body)"
# Web Content Accessibility Guidelines 2.2, 1.4.3 (text) and 1.4.11 (graphics).
TEXT_CONTRAST, GRAPHICS_CONTRAST = 4.5, 3.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def page(rich_page: str, tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(rich_page)
    return path


@browser_there
def test_it_fits_every_width_in_both_schemes(browser: Chromium, page: Path) -> None:
    backgrounds = {}
    for width in (PHONE, 640, SCREEN):
        for scheme in ("light", "dark"):
            browser.show(page, width, scheme)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            wide = browser.evaluate(
                "[...document.querySelectorAll('main *:not(svg *)')].filter(e =>"
                " e.getClientRects().length && !e.closest('.unseen') && !e.closest('.scroll') &&"
                " e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
                ".map(e => e.outerHTML.slice(0, 80))"
            )
            assert wide == []
            if width == SCREEN:  # no table's last column is out of sight
                cut = "[...document.querySelectorAll('.scroll')].filter(e =>"
                cut += " e.scrollWidth > e.clientWidth + 1).length"
                assert browser.evaluate(cut) == 0
            bars = "[...document.querySelectorAll('.bar, .panel svg')].filter(e =>"
            bars += " !e.clientWidth || !e.clientHeight).length"
            assert browser.evaluate(bars) == 0
            backgrounds[scheme] = browser.evaluate(
                "getComputedStyle(document.body).backgroundColor"
            )
            assert browser.requests() == [page.as_uri()] and browser.complaints() == []
    assert backgrounds["light"] == "rgb(244, 246, 248)" != backgrounds["dark"]


@browser_there
def test_tables_become_cards_on_a_phone(browser: Chromium, page: Path) -> None:
    label = "getComputedStyle(document.querySelector('td'), '::before').content"
    fits = "[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"
    browser.show(page, PHONE)
    assert browser.evaluate(label) not in ("none", "normal") and browser.evaluate(fits)
    browser.show(page, SCREEN)
    assert browser.evaluate(label) == "none" and browser.evaluate(fits)


@browser_there
def test_it_prints(browser: Chromium, page: Path, tmp_path: Path) -> None:
    browser.show(page, SCREEN, "dark")
    browser.ask("Emulation.setEmulatedMedia", media="print",
                features=[{"name": "prefers-color-scheme", "value": "dark"}])  # fmt: skip
    assert (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert browser.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert browser.evaluate("document.querySelector('nav').offsetHeight") == 0
    browser.print_pdf(tmp_path / "page.pdf")
    browser.ask("Emulation.setEmulatedMedia", media="")
    pdf = (tmp_path / "page.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 2


@browser_there
def test_hostile_text_runs_nowhere(
    browser: Chromium, rich_records: list[Record], tmp_path: Path
) -> None:
    for record in rich_records:
        record.model_type = record.software = HOSTILE
        record.test = f"{HOSTILE}{record.test}"
        record.warnings = [{"text": "<img src=x onerror=alert(1)>", "detail": HOSTILE}]
    page = tmp_path / "hostile.html"
    write_report(rich_records, page, HOSTILE)
    browser.show(page, PHONE)
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 0
    assert browser.evaluate("document.querySelectorAll('figure').length") == 4
    assert "alert(1)" in browser.evaluate("document.title")
    assert browser.requests() == [page.as_uri()] and browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= PHONE


def luminance(colour: str) -> float:
    """Relative luminance, as the guidelines define it."""
    parts = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_have_contrast_in_every_scheme() -> None:
    css = files("orinbench.show").joinpath("report.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.S)
    assert len(blocks) == 3  # light, dark, print
    light, *others = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks)
    for colours in (light, *(light | other for other in others)):  # others inherit
        for name in ("ink", "muted", "series-1"):  # series-1 is the links'
            for back in ("surface", "page"):
                assert contrast(colours[name], colours[back]) >= TEXT_CONTRAST, (name, back)
        for name, colour in colours.items():
            if name.startswith("series") or name in ("good", "bad"):
                assert contrast(colour, colours["surface"]) >= GRAPHICS_CONTRAST, name
