"""What the pages of the command line have in common: one HTML file that asks nobody for anything.

Pure text. Everything that comes from outside is escaped; light and dark follow the reader's system; pages fit the
width of a telephone. One short script, the only one that the page lets run, shows the titles in pictures under the
pointer, and one after the other for who uses keys; where scripts do not run, titles are what browsers make of them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

# Blue, orange, green, pink, sky and vermilion of a palette that colour-blind people tell apart.
COLOURS: Final = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --faint: #5b6570; --rule: #d5dae0;
  --c0: #0072b2; --c1: #b35c00; --c2: #007a5a; --c3: #a8437f; --c4: #56b4e9; --c5: #c14a00; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e8eaed; --faint: #a3acb6; --rule: #343a41;
  --c0: #56b4e9; --c1: #e69f00; --c2: #2fc79a; --c3: #e08fc0; --c4: #9ad0f5; --c5: #ff8a4c; } }
text { font: 12px system-ui, sans-serif; fill: var(--faint); }
""" + "".join(f".s{i} {{ stroke: var(--c{i}); }} .f{i} {{ fill: var(--c{i}); }}\n" for i in range(6))
"""For pictures on a page, and for those that stand alone: `f0` to `f5` fill, `s0` to `s5` draw lines."""

_STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 1.75rem 0 .25rem; }
h3 { font-size: .95rem; margin: .75rem 0 .25rem; } p { margin: .35rem 0; } .faint { color: var(--faint); }
figure { margin: 0; min-width: 0; } svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--rule); text-align: right; overflow-wrap: normal; }
th { font-weight: 600; vertical-align: bottom; } td { white-space: nowrap; }
:is(th, td):first-child { padding-left: 0; text-align: left; white-space: normal; min-width: 6.5rem; }
figcaption { font-size: .875rem; line-height: 1.35; }
.hit { fill: transparent; } .hit:hover { fill: var(--ink); fill-opacity: .12; }
.key { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .35rem 0; padding: 0; list-style: none;
  font-size: .875rem; }
.key svg { display: inline-block; width: 1.4rem; height: .8rem; margin-right: .35rem; vertical-align: -.05rem; }
summary { cursor: pointer; font-weight: 600; margin-top: 1.25rem; }
svg:focus-visible, summary:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
.hit.at { fill: var(--ink); fill-opacity: .22; }
#tip { position: fixed; z-index: 1; max-width: min(30rem, calc(100vw - 1rem)); padding: .3rem .5rem;
  pointer-events: none; white-space: pre-line; font-size: .8125rem; line-height: 1.35; border-radius: .25rem;
  background: var(--ink); color: var(--paper); }
"""

# Titles become names, so that no second box of the browser's own comes up over this one. A picture is one stop of the
# tab key, however many names it has: arrows go through them.
SCRIPT: Final = """
(() => {
  const tip = document.getElementById("tip"), pictures = new Map();
  let at = null;
  for (const title of document.querySelectorAll("svg title")) {
    const named = title.parentNode, picture = named.closest("svg[role=img]");
    named.dataset.name = title.textContent;
    title.remove();
    if (!picture) continue;
    if (!pictures.has(picture)) pictures.set(picture, []);
    pictures.get(picture).push(named);
  }
  const hide = () => { tip.hidden = true; at?.classList.remove("at"); at = null; };
  const show = (named, x, y) => {
    if (named !== at) {
      hide();
      at = named;
      at.classList.add("at");
      tip.textContent = named.dataset.name;
      tip.hidden = false;
    }
    const below = y + 18, room = innerHeight - tip.offsetHeight - 8;
    tip.style.left = Math.max(8, Math.min(x + 12, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(8, below <= room ? below : y - tip.offsetHeight - 12) + "px";
  };
  const point = event => {
    const named = event.target.closest?.("[data-name]");
    if (named) show(named, event.clientX, event.clientY); else hide();
  };
  addEventListener("pointermove", point);
  addEventListener("pointerdown", point);
  addEventListener("scroll", hide, true);
  for (const [picture, all] of pictures) {
    picture.tabIndex = 0;
    picture.addEventListener("blur", hide);
    picture.addEventListener("keydown", event => {
      const here = all.indexOf(at), last = all.length - 1;
      const to = { ArrowRight: Math.min(here + 1, last), ArrowLeft: Math.max(here - 1, 0), Home: 0, End: last };
      const next = to[event.key];
      if (event.key === "Escape") hide();
      if (next === undefined) return;
      event.preventDefault();
      const box = all[next].getBoundingClientRect();
      show(all[next], box.left + box.width / 2, box.bottom - 12);
    });
  }
})();
"""


def document(title: str, sentences: Sequence[str], body: str, *, style: str = "") -> str:
    """The whole HTML document: title and sentences are text, `body` is markup under them, `style` its own CSS."""
    runs = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{runs}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>{COLOURS}{_STYLE}{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        + paragraphs(sentences)
        + f'{body}<div id="tip" role="status" hidden></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def paragraphs(sentences: Iterable[str]) -> str:
    """Each sentence, which is text, in a paragraph of its own."""
    return "".join(f"<p>{escape(sentence)}</p>\n" for sentence in sentences)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text, under its columns; what is too wide for a telephone can be moved."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n'


def key(name: str, mark: str) -> str:
    """An entry of a legend, for a list of class `key`. `mark` is SVG, 28 wide and 16 high."""
    return f'<li><svg viewBox="0 0 28 16" aria-hidden="true">{mark}</svg>{escape(name)}</li>'
