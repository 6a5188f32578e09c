"""The pages in a real browser: alone, readable in light and dark and on a telephone, and names under the pointer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from loader_service.cli import app
from loader_service.cli.picture import render
from tests.cli.support import write_config, write_small_checkpoint
from tests.cli.test_picture import PAGE
from tests.support.browser import Browser, missing, started_browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(missing() != "", reason=f"no {missing()}: install Debian's chromium and chromium-driver"),
]
PAGES = ("plan", "load", "bench")
WIDE, PHONE = 1200, 390
SOME = 10  # of the names in a picture
LEAST_CONTRAST = 4.5  # of text against what is behind it, as WCAG asks for

# Colours as the browser shows them, of everything that has text of its own.
COLOURS = """
const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgb = colour => {
  paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
  return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const own = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
const shown = [...document.querySelectorAll("body *")].filter(e => own(e) && e.getClientRects().length);
const texts = shown.map(e => {
  const style = getComputedStyle(e);
  return [e.tagName, rgb(e.tagName === "text" ? style.fill : style.color)];
});
return [rgb(getComputedStyle(document.body).backgroundColor), texts];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    config = write_config(folder / "c.yaml", write_small_checkpoint(folder / "checkpoint"))
    for command in ("plan", "load"):
        assert app.run([command, str(config), "--load", "all", "--html", str(folder / f"{command}.html")]) == 0
    (folder / "bench.html").write_text(render(PAGE))
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_for_nothing_and_fits_any_window(name: str, pages: dict[str, Path], browser: Browser) -> None:
    for width in (WIDE, PHONE):
        browser.show(pages[name], width=width)
        assert browser.requests() == [pages[name].as_uri()]
        assert browser.console() == []
        assert browser.script("return document.documentElement.scrollWidth") <= width
        boxes = browser.script(
            "return [...document.querySelectorAll('svg[role=img]')].map(e => e.getBoundingClientRect().toJSON())"
        )
        assert len(boxes) >= {"plan": 2, "load": 7, "bench": 5}[name]
        assert all(box["width"] > width / 3 and box["height"] >= 15 and box["right"] <= width for box in boxes)


@pytest.mark.parametrize("name", PAGES)
def test_text_can_be_read_in_light_and_in_dark(name: str, pages: dict[str, Path], browser: Browser) -> None:
    behind = {}
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        browser.show(pages[name], scheme=scheme)
        behind[scheme], texts = browser.script(COLOURS)
        assert {"H1", "P", "TD", "text"} <= {tag for tag, _ in texts}
        faint = [(tag, colour) for tag, colour in texts if contrast(colour, behind[scheme]) < LEAST_CONTRAST]
        assert faint == []
    assert luminance(behind["light"]) > 0.9
    assert luminance(behind["dark"]) < 0.1


@pytest.mark.parametrize(
    ("name", "picture", "words"),
    [
        ("plan", "who takes what of b.safetensors", ("b.safetensors, bytes ", "down.weight", "taken by rank 0")),
        ("load", "who takes what of b.safetensors", ("b.safetensors, bytes ", "down.weight", "taken by rank 0")),
        ("load", "phases of the load", ("config: ", "finish: ")),
        ("bench", "Reads in flight over 0.40 seconds, rank 0", ("0.000 s: in flight 0", "0.300 s: in flight 0")),
    ],
)
def test_names_are_found_by_the_pointer_and_by_keys(
    name: str, picture: str, words: tuple[str, ...], pages: dict[str, Path], browser: Browser
) -> None:
    browser.show(pages[name], width=PHONE)
    of_picture = f"const svg = document.querySelector('svg[aria-label=\"{picture}\"]');"
    browser.script(f"{of_picture} svg.scrollIntoView({{ block: 'center' }})")
    named = browser.script(
        f"{of_picture} return [...svg.querySelectorAll('[data-name]')]"
        ".map(e => [e.dataset.name, e.getBoundingClientRect().toJSON()])"
    )
    names = [name for name, _ in named]
    assert all(any(word in name for name in names) for word in words)
    wide = [(name, box) for name, box in named if box["width"] >= 2]  # a pointer is on a whole pixel
    assert wide
    for name, box in wide[:: max(1, len(wide) // SOME)]:
        browser.point_at(box["left"] + box["width"] / 2, box["top"] + box["height"] / 2)
        assert tip(browser) == name
    browser.point_at(1, 1)
    assert tip(browser) == ""

    browser.script(f"{of_picture} svg.focus()")
    keyed = []
    for key in ("right", "right", "right", "left", "end"):
        browser.press(key)
        keyed.append(tip(browser))
    assert keyed == [names[i] for i in (0, 1, 2, 1, -1)]
    browser.press("escape")
    assert tip(browser) == ""


def test_a_picture_is_one_stop_of_the_tab_key(pages: dict[str, Path], browser: Browser) -> None:
    browser.show(pages["load"])
    stops = []
    for _ in range(12):
        browser.press("tab")
        stops.append(browser.script("return document.activeElement.getAttribute('aria-label') ?? ''"))
    charts = [label.split(" over ")[0] for label in stops if label]
    assert charts[:3] == ["phases of the load", "Throughput, GiB/s", "Reads in flight"]
    assert charts[-2:] == ["who takes what of a.safetensors", "who takes what of b.safetensors"]


def tip(browser: Browser) -> str:
    """What the box with a name says; it must lie in the window. Empty while there is none."""
    text, box = browser.script(
        "const tip = document.getElementById('tip');"
        "return [tip.hidden ? '' : tip.innerText, tip.getBoundingClientRect().toJSON()]"
    )
    assert not text or (box["left"] >= 0 and box["right"] <= PHONE and box["top"] >= 0 and box["bottom"] <= 900)
    return str(text)


def luminance(rgb: list[int]) -> float:
    parts = [value / 255 for value in rgb]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: list[int], other: list[int]) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
