"""What TensorRT-LLM's own loader takes a checkpoint for. Some releases ignore what they do not know, without a word."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from pipelines.engine.trtllm import provenance
from pipelines.engine.trtllm.case import algorithm
from pipelines.engine.trtllm.running import run
from pipelines.errors import StageFailed
from pipelines.flow.store import Fact
from pipelines.quantize.scheme import parse

ASK = """
import sys
from tensorrt_llm._torch.model_config import ModelConfig
found = ModelConfig.from_pretrained(sys.argv[1]).quant_config.quant_algo
print("recognized:", getattr(found, "value", found) or "")
"""
SAID = "recognized:"
SAME = {"NO_QUANT": "", "None": ""}


def recognized(checkpoint: Path, known: Mapping[str, Fact], log: Path) -> str:
    """The quantization the loader sees, which must be the variant's; without the library, the variant's unproven.

    Raises:
        StageFailed: it sees another one, or none where there is one, or fails.
    """
    promised, named = known.get("quant_algo"), str(known.get("scheme") or "BF16").partition(",")[0]
    wanted = promised if isinstance(promised, str) else algorithm(parse(named), str(known.get("quant_method") or ""))
    if provenance.simulated():
        return wanted or ""
    run([sys.executable, "-c", ASK, str(checkpoint)], log)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(SAID)]
    said = lines[-1].removeprefix(SAID).strip() if lines else "nothing"
    found = SAME.get(said, said)
    if found != (wanted or ""):
        raise StageFailed(
            f"{checkpoint}: the loader takes it for {found or 'not quantized'}, and it is {wanted or 'not quantized'}; "
            "it would take codes for weights, or read them wrongly"
        )
    return found
