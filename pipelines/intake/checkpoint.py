"""The base checkpoint: inspected from headers alone when planning, verified in full before anything is built on it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from pipelines.config import Strict, find
from pipelines.errors import InputError, closest
from pipelines.flow.store import Fact, digest_of
from pipelines.intake import gguf, licence, shards, spdx
from pipelines.intake.digests import DigestCache
from pipelines.intake.licence import Licence

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Files that make a checkpoint what it is; everything else in a directory (READMEs aside) is left behind.
_KEPT = re.compile(
    r"(\.safetensors|\.safetensors\.index\.json|\.json|\.jinja|\.model|\.txt|"
    r"licen[cs]e.*|use_policy.*|notice.*|copying.*)$",
    re.I,
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NUMBERS = (
    "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "num_attention_heads",
    "num_key_value_heads", "head_dim", "kv_lora_rank", "qk_rope_head_dim",
)  # fmt: skip
_FETCHED = (
    "*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", licence.CARD, "LICEN[CS]E*", "[Ll]icen[cs]e*",
    "USE_POLICY*", "NOTICE*", "Notice*", "COPYING*",
)  # fmt: skip
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


class CheckpointConfig(Strict):
    """Where the base checkpoint comes from."""

    source: str = Field(description="a local Hugging Face directory, a .gguf file, or a hub id (owner/name)")
    revision: str | None = Field(default=None, description="for a hub id: the commit, 40 hex digits; a branch can move")
    licence: str = Field(
        default="", description="SPDX id, which a person answers for; empty to read it from the checkpoint itself"
    )
    note: str = Field(default="", description="what a reader of the report must know about this base")

    @field_validator("licence")
    @classmethod
    def _is_a_licence(cls, given: str) -> str:
        if given and not spdx.canonical(given):
            near = closest(given, spdx.known())
            raise ValueError(f"no SPDX id or expression; LicenseRef-NAME is one that SPDX does not list ({near})")
        return spdx.canonical(given)


class ImportConfig(Strict):
    """What the checkpoint stage is keyed on: the content, not where it lies nor what it may be used under."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"source", "licence", "licence_source", "prior_quantization"})
    kind: Literal["directory", "gguf", "hub"]
    source: str
    digest: str
    licence: str
    licence_source: str
    prior_quantization: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """What can be known of a checkpoint without loading its weights.

    `licence` is what it may be used under, from wherever that is told.
    `fused_experts` are tensors that hold the matrices of all experts of a layer, so that none is a linear layer;
    `kv_width` the numbers that a layer keeps of each token, 0 where that is unknown.
    """

    config: ImportConfig
    architecture: str
    model_type: str
    linear_shapes: Mapping[str, tuple[int, int]]
    parameters: int
    size_bytes: int
    hidden_size: int
    layers: int
    vocab_size: int
    max_positions: int
    heads: int = 0
    kv_heads: int = 0
    kv_width: int = 0
    fused_experts: tuple[str, ...] = ()
    licence: Licence = field(default_factory=Licence)

    def facts(self) -> dict[str, Fact]:
        """What a target may want to know of a base; a number that its config does not have is None."""
        return {
            "architecture": self.architecture,
            "parameters": self.parameters,
            "base_bytes": self.size_bytes,
            "max_positions": self.max_positions or None,
            "vocab_size": self.vocab_size or None,
            "hidden_size": self.hidden_size or None,
            "layers": self.layers or None,
            "heads": self.heads or None,
            "kv_heads": self.kv_heads or None,
            "kv_width": self.kv_width or None,
        }


def inspect(config: CheckpointConfig, cache: DigestCache) -> Inspected:
    """Find, check and hash a checkpoint by its headers.

    Raises:
        InputError: what is missing or broken, and the key to change (`checkpoint.source` or `.revision`).
    """
    path = _locate(config)
    if config.source.endswith(".gguf"):
        return _inspect_gguf(path, config, cache)
    if path.is_dir():
        return _inspect_directory(path, config, cache)
    if _HUB_ID.match(config.source) and not path.exists():
        return _inspect_directory(_fetch(config), config, cache)
    raise InputError(
        f"checkpoint.source={config.source!r}: no such directory or file ({path}); "
        "give a Hugging Face directory, a .gguf file or a hub id (owner/name)"
    )


def _locate(config: CheckpointConfig) -> Path:
    """Where the source lies; "package:name/file" is a file an installed package ships."""
    if not config.source.startswith("package:"):
        return find(config.source)
    package, _, inside = config.source.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise InputError(
            f"checkpoint.source={config.source!r}: package {package!r} is not installed (`make demo` fetches it)"
        )
    return Path(spec.origin).parent / inside


def _fetch(config: CheckpointConfig) -> Path:
    """Bring a hub checkpoint to the local cache, pinned to a commit; no pickles, no code."""
    if not config.revision or not _COMMIT.match(config.revision):
        raise InputError(
            f"checkpoint.revision={config.revision!r}: a hub id needs the commit it is pinned to "
            "(40 hex digits; a branch or tag can move)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                config.source,
                revision=config.revision,
                allow_patterns=list(_FETCHED),
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"checkpoint.source={config.source!r}: cannot be fetched from the hub ({reason})") from None


def _inspect_gguf(path: Path, config: CheckpointConfig, cache: DigestCache) -> Inspected:
    if not path.is_file():
        raise InputError(f"checkpoint.source={config.source!r}: no such file ({path})")
    digest = cache.of_all([path], path.parent)
    read = digest_of({"file": digest, "header": gguf.HEADER_VERSION})
    header = gguf.GgufHeader.model_validate(cache.found_in(read, lambda: gguf.read_header(path).model_dump()))
    under = licence.of_gguf(header.licence, header.licence_name, header.licence_link, config.licence)
    imported = ImportConfig(
        kind="gguf",
        source=str(path),
        digest=digest,
        licence=under.id,
        licence_source=under.source,
        prior_quantization=header.quantization,
    )
    return Inspected(
        imported,
        gguf.TRANSFORMERS_NAMES.get(header.architecture, header.architecture),
        header.architecture,  # llama.cpp's names of these are transformers' names of the model types
        header.linear_shapes,
        header.parameters,
        header.parameters * 2,
        header.hidden_size,
        header.layers,
        header.vocab_size,
        header.max_positions,
        header.heads,
        header.kv_heads,
        2 * header.kv_heads * (header.hidden_size // header.heads) if header.heads else 0,
        licence=under,
    )


def _inspect_directory(path: Path, config: CheckpointConfig, cache: DigestCache) -> Inspected:
    if not any(path.iterdir()):
        raise InputError(f"checkpoint.source={config.source!r}: the directory is empty ({path})")
    model = read_model_config(path)
    tensors = shards.read_headers(path)
    if not tensors:
        raise InputError(f"checkpoint.source={config.source!r}: its weights hold no tensors")
    quantized = (model.get("quantization_config") or {}).get("quant_method")
    if quantized:
        raise InputError(
            f"checkpoint.source={config.source!r}: is quantized already ({quantized}); give the base it was made from"
        )
    _check_tokenizer(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(
            f"checkpoint.source={config.source!r}: no tokenizer ({' or '.join(TOKENIZER_FILES)}) in {path}"
        )
    kept = kept_files(path)
    under = licence.of_directory(path, config.licence)
    imported = ImportConfig(
        kind="hub" if config.revision else "directory",
        source=str(path),
        digest=cache.of_all(kept, path),
        licence=under.id,
        licence_source=under.source,
        prior_quantization="",
    )
    shapes = {
        name.removesuffix(".weight"): (t.shape[0], t.shape[1])
        for name, t in tensors.items()
        if name.endswith(".weight") and len(t.shape) == 2 and "embed" not in name
    }
    return Inspected(
        imported,
        (model.get("architectures") or ["?"])[0],
        str(model["model_type"]),
        shapes,
        sum(t.elements for t in tensors.values()),
        sum(t.size_bytes for t in tensors.values()),
        int(model.get("hidden_size") or 0),
        int(model.get("num_hidden_layers") or 0),
        int(model.get("vocab_size") or 0),
        int(model.get("max_position_embeddings") or 0),
        int(model.get("num_attention_heads") or 0),
        int(model.get("num_key_value_heads") or model.get("num_attention_heads") or 0),
        _kv_width(model),
        tuple(name for name, t in tensors.items() if len(t.shape) > 2 and "experts" in name),
        under,
    )


def _kv_width(model: Mapping[str, Any]) -> int:
    """Keys and values of a token in one layer; of latent attention (DeepSeek's MLA) the latent and the rotary part."""
    rank = int(model.get("kv_lora_rank") or 0)
    if rank:
        return rank + int(model.get("qk_rope_head_dim") or 0)
    heads = int(model.get("num_attention_heads") or 0)
    size = int(model.get("head_dim") or (int(model.get("hidden_size") or 0) // heads if heads else 0))
    return 2 * int(model.get("num_key_value_heads") or heads) * size


def _check_tokenizer(path: Path) -> None:
    """A tokenizer.json that is no JSON is told now, not when the first text is tokenized."""
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            json.loads(file.read_bytes())
        except ValueError as error:
            raise InputError(f"{file}: not valid JSON ({error})") from None


def read_model_config(path: Path) -> dict[str, Any]:
    """Read config.json. Whether transformers knows its model_type is found out when it is imported.

    Raises:
        InputError: no config.json, not a JSON object with a model_type, or numbers that are none.
    """
    file = path / "config.json"
    try:
        model: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise InputError(f"{file}: missing; a Hugging Face checkpoint directory has one") from None
    except (ValueError, OSError) as error:
        raise InputError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(model, dict):
        raise InputError(f"{file}: holds {type(model).__name__}, not the keys of a model's configuration")
    for key in _NUMBERS:
        if not isinstance(model.get(key, 0), int | None):
            raise InputError(f"{file}: {key}={model[key]!r} is not a whole number")
    if not model.get("model_type"):
        raise InputError(f"{file}: names no model_type, so the architecture is unknown")
    return model


def kept_files(path: Path) -> list[Path]:
    """The files of a checkpoint directory that are part of it.

    Raises:
        InputError: the weights are pickles only. A pickle can run code when it is loaded.
    """
    files = [p for p in path.iterdir() if p.is_file()]
    pickles = [p.name for p in files if p.suffix in _PICKLES]
    if pickles and not any(p.suffix == ".safetensors" for p in files):
        raise InputError(f"{path}: only pickle weights ({', '.join(sorted(pickles)[:3])}); convert them to safetensors")
    return [p for p in files if _KEPT.search(p.name)]
