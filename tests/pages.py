"""What an HTML page holds, without a browser."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """What a page refers to, and the text it shows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts = 0
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
