"""Reads a server's metrics about once a second, from a thread: a server too busy to answer holds up no sample."""

from __future__ import annotations

import http.client
import threading
import time
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from pipelines.probe import metrics
from pipelines.probe.metrics import Scrape

if TYPE_CHECKING:
    from types import TracebackType

EVERY_S = 1.0
TIMEOUT_S = 2.0
NO_METRICS = "the server has no Prometheus metrics"


class Scraper:
    """The newest scrape, once. `note` says why there is none, "" where there was one."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self.note = "no scrape was answered yet" if url else NO_METRICS
        self._newest: Scrape | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True) if url else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()

    def take(self) -> Scrape | None:
        """What was scraped since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def again(self) -> None:
        """Scrape once more, now: the counters at the end of a load."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)
            self._scrape()

    def _run(self) -> None:
        while not self._ended.is_set():
            began_s = time.monotonic()
            self._scrape()
            self._ended.wait(max(0.0, EVERY_S - (time.monotonic() - began_s)))

    def _scrape(self) -> None:
        connection = http.client.HTTPConnection(self._url.netloc, timeout=TIMEOUT_S)
        try:
            connection.request("GET", self._url.path)
            answer = connection.getresponse()
            page = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.note = self.note and f"{self._url.path} was not answered: {error}"
            return
        finally:
            connection.close()
        if answer.status != http.client.OK:
            self.note = self.note and f"{self._url.path} answered with status {answer.status}"
            return
        found = metrics.read(page.decode("utf-8", errors="replace"))
        if found == Scrape():
            self.note = self.note and f"{self._url.path} tells nothing that is known here"
            return
        self._newest, self.note = found, ""
