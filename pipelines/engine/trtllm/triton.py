"""`model.yaml` for Triton's llmapi models, which serve a bundle of the PyTorch backend without `trtllm-serve`.

Its keys are LlmArgs and `triton_config`; TensorRT-LLM's own repository has the model directory that reads it, at
triton_backend/all_models/llmapi.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.engine.trtllm.record import SETTINGS, read
from pipelines.engine.trtllm.text import yaml_of

MODEL = "triton/model.yaml"
_COMMENT = (
    "For Triton: copy triton_backend/all_models/llmapi of TensorRT-LLM {release}, mount this bundle, and start the\n"
    "server with LLM_CONFIG_PATH={at}. Set triton_config.decoupled to true for streams."
)


def files(engine: Path, mounted: str) -> dict[str, str]:
    """Texts by their path in a bundle. `mounted` is where the engine's directory will lie."""
    import yaml

    record = read(engine)
    settings: dict[str, Any] = yaml.safe_load((engine / SETTINGS).read_text()) or {}
    given = {
        "model": f"{mounted}/{record.model}",
        "tokenizer": mounted,
        "backend": record.backend,
        "max_batch_size": record.max_batch_size,
        "max_num_tokens": record.max_num_tokens,
        "max_seq_len": record.max_seq_len,
        "max_beam_width": record.max_beam_width,
        **settings,
        "triton_config": {"max_batch_size": 0, "decoupled": False},
    }
    return {MODEL: yaml_of(given, _COMMENT.format(release=record.release, at=f"{Path(mounted).parent}/{MODEL}"))}
