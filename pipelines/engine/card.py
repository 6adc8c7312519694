"""`engine.json`: what an engine directory says about itself, whatever its target."""

from __future__ import annotations

import json
from pathlib import Path

from pipelines.config import Strict, parse
from pipelines.errors import InputError


class EngineCard(Strict):
    """Written by the target that built the engine; read by servers, scoring and probing.

    max_length: tokens of a prompt with its answer; max_prompt: of a prompt alone, where that is less.
    startup_timeout_s: how long its server may take to answer, where that is more than most need.
    """

    target: str
    native: bool
    native_note: str
    max_length: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    vocab_size: int
    model_id: str
    max_prompt: int | None = None
    startup_timeout_s: float | None = None


def read_card(engine_dir: Path) -> EngineCard:
    """Read an engine directory's card.

    Raises:
        InputError: there is none, or it is not JSON.
        ConfigError: it has other keys or types than a card.
    """
    path = engine_dir / "engine.json"
    try:
        data = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{engine_dir}: no engine.json: not an engine directory") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    return parse(EngineCard, data, str(path))


def end_tokens(variant: Path) -> list[int]:
    """A checkpoint's end tokens: generation_config.json first, as transformers has it, then config.json.

    Raises:
        InputError: neither names one.
    """
    for name in ("generation_config.json", "config.json"):
        path = variant / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [int(i) for i in found] if isinstance(found, list) else [int(found)]
    raise InputError(f"{variant}: neither generation_config.json nor config.json names an end token (eos_token_id)")
