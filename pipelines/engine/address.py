"""Where a server that is not ours is, and with which key: what can be said against either before anything is sent.

A key is only ever named. A problem never shows a value that may hold one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit, urlunsplit

from pipelines.errors import Problem

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OPERATIONS = ("/completions", "/chat/completions", "/models")
HIDDEN = "***"


def url_problems(url: str, key: str) -> Iterator[Problem]:
    """What keeps a URL from being an API's address; `key` is the configuration's."""
    if not url:
        yield Problem(key, url, "missing", "the API's address, its version included: https://host/v1")
        return
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        yield Problem(key, shown(url), f"is no URL ({error})", "e.g. https://host:8000/v1")
        return
    if any(c.isspace() or not c.isprintable() for c in url):
        yield Problem(key, shown(url), "holds a space or a control character")
    if parts.scheme not in ("http", "https"):
        yield Problem(key, shown(url), "is neither http nor https", "e.g. https://host:8000/v1")
    elif not host:
        yield Problem(key, shown(url), "names no host", "e.g. https://host:8000/v1")
    if port == 0:
        yield Problem(key, shown(url), "port 0 is none")
    if "@" in parts.netloc:
        yield Problem(key, shown(url), "holds credentials, which would be written down", "a key goes into api_key_env")
    if parts.query or parts.fragment:
        yield Problem(key, shown(url), "holds a query or a fragment, which an API's address has not")
    for operation in OPERATIONS:
        if parts.path.rstrip("/").endswith(operation):
            base = urlunsplit(parts._replace(path=parts.path.rstrip("/").removesuffix(operation)))
            yield Problem(key, shown(url), "is one operation of an API, not its address", f"e.g. {shown(base)}")
            return


def shown(url: str) -> str:
    """A URL without what may be secret in it: the part before the host, and the query."""
    before, at, after = url.rpartition("@")
    scheme, found, _ = before.partition("://")
    without = f"{scheme}://{HIDDEN}@{after}" if found else f"{HIDDEN}@{after}" if at else url
    head, mark, _ = without.partition("?")
    return head + (f"?{HIDDEN}" if mark else "")


def key_problems(variable: str, key: str, environment: Mapping[str, str] | None = None) -> Iterator[Problem]:
    """What keeps an environment variable from giving a key; "" asks for none."""
    if not variable:
        return
    if not VARIABLE.fullmatch(variable):
        yield Problem(key, HIDDEN, "is no name of an environment variable", "the name of one, never the key itself")
        return
    value = (os.environ if environment is None else environment).get(variable, "")
    if not value:
        yield Problem(key, variable, "no such environment variable is set here, or it is empty")
    elif not value.isascii() or not value.isprintable() or " " in value:
        yield Problem(key, variable, "the variable holds what no header may: a space, a line end or no ASCII")


def headers(variable: str) -> dict[str, str]:
    """What each request carries: the key of an environment variable, as OpenAI's clients send it."""
    return {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}
