"""A checkpoint read back from disk: as transformers loads it, and as our own dequantization reads it.

Several libraries write checkpoints that load without an error and are noise, so loading here is suspicious: an
unknown method, a wrong declaration, or one key too many or too few is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipelines.errors import StageFailed, closest
from pipelines.intake.gguf import read_once
from pipelines.quantize.gguf import FILE, METHOD
from pipelines.quantize.packing import QuantizedModules, check_declared_format, dequantize, open_quantized
from pipelines.quantize.rounding import Rounding, rounded, rounding_of
from pipelines.quantize.shards import quantization_config
from pipelines.quantize.stored import scheme_of

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

READ_HERE = frozenset({"modelopt"})
"""Methods that transformers does not know, and would load as noise; their own runtimes read them."""
LOADING_ERRORS = (ValueError, RuntimeError, ImportError, OSError, KeyError, AttributeError, TypeError)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in eval mode, and what ran it."""

    model: PreTrainedModel
    implementation: str


def load(variant: Path, dtype: str = "float32") -> LoadedModel:
    """Load a checkpoint through transformers, weights packed or not, as its own method says.

    What transformers cannot read but we can is dequantized by our own reading, its layers' inputs rounded as it says.

    Raises:
        StageFailed: transformers does not know the method and would skip it, the declared format is not the one on
            disk, tensors are missing or left over, or loading raised.
    """
    import torch
    import transformers

    method = quantization_config(variant).get("quant_method", "unquantized")
    if method in READ_HERE:
        return _load_rounded(variant)
    if method == METHOD:
        return _load_gguf(variant, dtype)
    _refuse_unknown_method(variant)
    check_declared_format(variant)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            variant, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except LOADING_ERRORS as error:
        raise StageFailed(f"{variant}: transformers cannot load it ({type(error).__name__}: {error})") from error
    _refuse_leftovers(variant, info)
    unpacked = _unpack_float4(model, quantization_config(variant), getattr(torch, dtype))
    return LoadedModel(model.eval(), f"transformers {transformers.__version__} {dtype}, {method}{unpacked}")


def _load_gguf(variant: Path, dtype: str) -> LoadedModel:
    """Load a GGUF file dequantized, its configuration from the file's own metadata, as llama.cpp reads it."""
    import torch
    import transformers

    how = transformers.GgufConfig(dequantize=True)
    where: dict[str, Any] = {"gguf_file": FILE, "quantization_config": how, "dtype": getattr(torch, dtype)}
    try:
        with read_once():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(variant, output_loading_info=True, **where)
    except LOADING_ERRORS as error:
        raise StageFailed(f"{variant}: transformers cannot load it ({type(error).__name__}: {error})") from error
    _refuse_leftovers(variant, info)
    return LoadedModel(model.eval(), f"transformers {transformers.__version__} {dtype}, {METHOD} dequantized")


def _unpack_float4(model: PreTrainedModel, config: Mapping[str, Any], dtype: torch.dtype) -> str:
    """Unpack 4-bit floats now: on the first call they would become bfloat16 whatever dtype the model is in."""
    import torch

    groups = (config.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    if not any((w.get("num_bits"), w.get("type")) == (4, "float") for w in weights):
        return ""
    model.hf_quantizer.compressor.decompress_model(model=model)
    for tensor in model.parameters():
        if tensor.dtype == torch.bfloat16:
            tensor.data = tensor.data.to(dtype)
    return ", weights unpacked to bfloat16"


def dense(variant: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's state dict with every quantized weight dequantized by our own reading, all in float32."""
    import torch

    quantized = open_quantized(variant)
    state = _unquantized(quantized)
    state.update({f"{name}.weight": torch.from_numpy(dequantize(layer)) for name, layer in quantized.items()})
    return state


def load_dense(variant: Path, *, lazily: bool = False) -> LoadedModel:
    """Load a checkpoint with our own dequantization, in float32, activations untouched.

    With `lazily`, quantized layers hold a placeholder of one element and dequantize each time they are called, so
    the model takes the memory of its unquantized tensors and one layer.
    """
    import torch
    import transformers

    quantized = open_quantized(variant)
    config = transformers.AutoConfig.from_pretrained(variant)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = _unquantized(quantized)
    shapes = {} if lazily else {f"{n}.weight": torch.from_numpy(dequantize(layer)) for n, layer in quantized.items()}
    if lazily:
        shapes = {f"{n}.weight": torch.zeros(1, 1).expand(quantized.shape(n)) for n in quantized}
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise StageFailed(f"{variant}: model_type {config.model_type!r} is no causal language model of transformers")
    model, info = known[type(config)].from_pretrained(
        None, config=config, state_dict=state | shapes, dtype=torch.float32, output_loading_info=True
    )
    _refuse_leftovers(variant, info)
    if lazily:
        for name in quantized:
            _dequantize_when_called(model.get_submodule(name), quantized, name)
    return LoadedModel(model.eval(), f"transformers {transformers.__version__} float32, dequantized")


def _load_rounded(variant: Path) -> LoadedModel:
    """Load with our own dequantization, every layer's input rounded as the checkpoint has it."""
    import torch

    loaded, quantized = load_dense(variant), open_quantized(variant)
    config, kinds = quantization_config(variant), set()
    for name in quantized:
        how = rounding_of(quantized.shards, name, scheme_of(quantized.shards, name, config))
        if how is not None:
            layer = quantized[name]
            weight = torch.from_numpy(dequantize(replace(layer, pre_scale=None)))
            _round_when_called(loaded.model.get_submodule(name), weight, layer.pre_scale, how)
            kinds.add(how.kind)
    said = [f"inputs rounded to {', '.join(sorted(kinds))}"] if kinds else []
    said += ["keys and values as computed"] if config.get("kv_cache_scheme") else []
    return replace(loaded, implementation="; ".join([loaded.implementation, *said]))


def logits(loaded: LoadedModel, ids: NDArray[np.integer]) -> NDArray[np.float32]:
    """The next-token logits at every position: ids [windows, length] -> float32 [windows, length, vocabulary]."""
    import numpy as np

    return np.stack([_window_logits(loaded, row) for row in np.atleast_2d(ids)])


def token_logprobs(loaded: LoadedModel, ids: NDArray[np.integer]) -> NDArray[np.float32]:
    """Natural-log probabilities of the true next tokens: ids [windows, length] -> float32 [windows, length - 1]."""
    import numpy as np

    return np.stack([next_token_logprobs(_window_logits(loaded, row), row) for row in np.atleast_2d(ids)])


def next_token_logprobs(scores: NDArray[np.float32], ids: NDArray[np.integer]) -> NDArray[np.float32]:
    """Log-softmax of logits [length, vocabulary] at the tokens that follow, [length - 1]."""
    import numpy as np

    ahead = scores[:-1]
    top = ahead.max(axis=1, keepdims=True)
    norm = np.log(np.exp(ahead - top).sum(axis=1, dtype=np.float64)) + top[:, 0]
    found: NDArray[np.float32] = (ahead[np.arange(len(ahead)), ids[1:]] - norm).astype(np.float32)
    return found


def perplexity(logprobs: NDArray[np.float32]) -> float:
    """exp of the mean negative log-probability."""
    import numpy as np

    return float(np.exp(-logprobs.astype(np.float64).mean()))


def _window_logits(loaded: LoadedModel, row: NDArray[np.integer]) -> NDArray[np.float32]:
    import torch

    with torch.inference_mode():
        found = loaded.model(torch.as_tensor(row, dtype=torch.long)[None], use_cache=False).logits
    scores: NDArray[np.float32] = found[0].float().numpy()
    return scores


def _unquantized(quantized: QuantizedModules) -> dict[str, torch.Tensor]:
    import torch

    shards = quantized.shards
    names = [n for n in shards if not quantized.owns(n)]
    return {n: torch.from_numpy(shards[n].copy()).float() for n in names}


def _dequantize_when_called(module: torch.nn.Module, quantized: QuantizedModules, name: str) -> None:
    import torch

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = torch.from_numpy(dequantize(quantized[name]))
        return torch.nn.functional.linear(x, weight, cast("torch.Tensor | None", module.bias))

    module.forward = forward


def _round_when_called(
    module: torch.nn.Module, weight: torch.Tensor, factor: NDArray[np.float32] | None, how: Rounding
) -> None:
    import torch

    before = None if factor is None else torch.from_numpy(factor)

    def forward(x: torch.Tensor) -> torch.Tensor:
        given = rounded(x if before is None else x * before, how)
        return torch.nn.functional.linear(given, weight, cast("torch.Tensor | None", module.bias))

    module.forward = forward


def _refuse_unknown_method(variant: Path) -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    config = quantization_config(variant)
    if config and config.get("quant_method") not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        method = str(config.get("quant_method"))
        known = closest(method, AUTO_QUANTIZATION_CONFIG_MAPPING)
        raise StageFailed(
            f"{variant}: quant_method {method!r} is unknown to transformers, "
            f"which would take the codes for weights ({known})"
        )


def _refuse_leftovers(variant: Path, info: dict[str, Any]) -> None:
    found = {
        what: sorted(map(str, info.get(what, ()))) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    told = [f"{len(keys)} {what.replace('_', ' ')}: {', '.join(keys[:5])}" for what, keys in found.items() if keys]
    told += [str(e) for e in info.get("error_msgs", ())]
    if told:
        raise StageFailed(f"{variant}: not every tensor found its place ({'; '.join(told)})")
