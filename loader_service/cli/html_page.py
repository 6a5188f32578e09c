"""What the pages of the command line have in common: one HTML file that asks nobody for anything.

Pure text. Everything that comes from outside is escaped; light and dark follow the reader's system; pages fit the
width of a telephone.
"""

from __future__ import annotations

from collections.abc import Sequence
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
table { border-collapse: collapse; width: 100%; max-width: 44rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem .25rem 0; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
.hit { fill: transparent; } .hit:hover { fill: var(--ink); fill-opacity: .12; }
.key { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: 0; padding: 0; list-style: none; font-size: .875rem; }
.key svg { display: inline-block; width: 1.4rem; height: .8rem; margin-right: .35rem; vertical-align: -.05rem; }
summary { cursor: pointer; font-weight: 600; margin-top: 1.25rem; }
"""


def document(title: str, sentences: Sequence[str], body: str, *, style: str = "") -> str:
    """The whole HTML document: title and sentences are text, `body` is markup under them, `style` its own CSS."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{COLOURS}{_STYLE}{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        + "".join(f"<p>{escape(sentence)}</p>\n" for sentence in sentences)
        + f"{body}</body>\n</html>\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text, under its columns."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def key(name: str, mark: str) -> str:
    """An entry of a legend, for a list of class `key`. `mark` is SVG, 28 wide and 16 high."""
    return f'<li><svg viewBox="0 0 28 16" aria-hidden="true">{mark}</svg>{escape(name)}</li>'
