"""Pages as tests see them: well formed, alone in the world, and nobody's text is their markup."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from loader_service.cli.html_page import SCRIPT

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = "<script>alert(1)</script>&\"'><img src=x onerror=1>"


class Parsed(HTMLParser):
    """Every tag with its attributes; fails where one is closed that was not opened last."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def check_alone(text: str) -> Parsed:
    """Nothing on the page asks for anything; what runs is the page's own script alone, and its policy says so."""
    assert text.count("<script>") == text.count(f"<script>{SCRIPT}</script>") == 1
    runs = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{runs}'" in text
    assert not re.search(r"fetch|XMLHttp|WebSocket|import|innerHTML|insertAdjacent|eval|Function", SCRIPT)
    return check_still(text.replace(f"<script>{SCRIPT}</script>", ""))


def check_still(text: str) -> Parsed:
    """Nothing asks for anything, or runs."""
    parsed = Parsed(text)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "use", "image", "base"}
    names = {name for _, attrs in parsed.tags for name in attrs}
    assert not {name for name in names if name.startswith("on") or name in {"src", "href", "srcset", "xlink:href"}}
    assert not re.search(r"https?:|url\(|@import", text)
    return parsed
