"""A small probe configuration and a tiny tokenizer for tests."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter

from pipelines.probe.config import ProbeConfig
from pipelines.probe.profiles import LoadProfile


def probe_config(**changes: object) -> ProbeConfig:
    """Two profiles, closed with 4 requests and open with 6, changed as told."""
    given: dict[str, object] = {
        "profiles": [
            {"name": "closed_2", "mode": "closed", "concurrency": 2, "requests": 4},
            {"name": "open_40", "mode": "open", "rate": 40.0, "requests": 6},
        ],
        "prompts": "/nowhere/requests.jsonl",
        "threads": 1,
        "rounds": 2,
        "warmup_requests": 2,
        "warmup_max_requests": 2,
        "max_tokens": 6,
        "timeout_s": 30.0,
        "seed": 5,
    }
    return ProbeConfig.model_validate(given | changes)


def profile(mode: str, **settings: object) -> LoadProfile:
    """A load profile named by its mode."""
    made: LoadProfile = TypeAdapter(LoadProfile).validate_python({"name": mode, "mode": mode, **settings})
    return made


def write_tokenizer(engine_dir: Path) -> None:
    """Write a tokenizer of two special tokens and the words w0 to w99 (ids 2 to 101), and an engine.json."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {"<unk>": 0, "<s>": 1} | {f"w{k}": k + 2 for k in range(100)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    engine_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(engine_dir / "tokenizer.json"))
    (engine_dir / "engine.json").write_text(json.dumps({"target": "fake", "max_length": 64}))
