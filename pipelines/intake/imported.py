"""The checkpoint stage: from wherever the base lies to a verified Hugging Face directory in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.errors import InputError
from pipelines.flow import progress
from pipelines.flow.store import Fact
from pipelines.intake import gguf, shards
from pipelines.intake.checkpoint import ImportConfig, kept_files, read_model_config
from pipelines.intake.lean import without_unused
from pipelines.intake.licence import UNKNOWN


@without_unused()
def run(config: ImportConfig, out: Path) -> dict[str, Fact]:
    """Bring the base in and verify all of it: every weight finite, architecture known, tokenizer loads.

    A directory is linked file by file, not copied. A GGUF file is dequantized to bfloat16.

    Raises:
        InputError: whatever is wrong with the checkpoint.
    """
    source = Path(config.source)
    progress.report(0, 3, "reading the checkpoint")
    if config.kind == "gguf":
        gguf.to_checkpoint(source, out)
    else:
        for file in kept_files(source):
            (out / file.name).symlink_to(file.resolve())
    progress.report(1, 3, "checking every weight")
    bad = shards.nonfinite(out)
    if bad:
        raise InputError(f"checkpoint.source={config.source!r}: NaN or infinite values in {', '.join(bad[:5])}")
    progress.report(2, 3, "loading the tokenizer")
    return _facts(out, config)


def _facts(out: Path, config: ImportConfig) -> dict[str, Fact]:
    model = read_model_config(out)
    tensors = shards.read_headers(out)
    dtypes = sorted({t.dtype for t in tensors.values()})
    return {
        "architecture": _architecture(model),
        "parameters": sum(t.elements for t in tensors.values()),
        "dtype": "+".join(dtypes),
        "size_bytes": sum(t.size_bytes for t in tensors.values()),
        "hidden_size": model.get("hidden_size"),
        "layers": model.get("num_hidden_layers"),
        "vocab_size": model.get("vocab_size"),
        "tied_embeddings": bool(model.get("tie_word_embeddings")),
        "has_chat_template": _has_chat_template(out, config),
        "licence": config.licence or UNKNOWN,
        "licence_source": config.licence_source,
        "prior_quantization": config.prior_quantization,
    }


def _architecture(model: dict[str, Any]) -> str:
    """The class transformers would build, or an error that offers the closest known model_type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    from pipelines.errors import closest

    kind = str(model["model_type"])
    if kind not in KNOWN:
        raise InputError(
            f"config.json: model_type {kind!r} is no causal language model that transformers knows; "
            f"{closest(kind, KNOWN)}"
        )
    return str((model.get("architectures") or [KNOWN[kind]])[0])


def _has_chat_template(out: Path, config: ImportConfig) -> bool:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(out)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"checkpoint.source={config.source!r}: its tokenizer does not load ({reason})") from None
    return bool(tokenizer.chat_template)
