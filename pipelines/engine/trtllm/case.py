"""A variant, GPUs and limits as every rule looks at them, whichever of the two targets asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.engine.pairing import Pairing
from pipelines.engine.trtllm.options import Gpu
from pipelines.engine.trtllm.rules import PLAIN, Backend
from pipelines.quantize.scheme import Scheme, parse


@dataclass(frozen=True, slots=True)
class Limits:
    """What the runtime is asked to hold. `packed`: padding removed and context FMHA on, as is the default."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int | None
    max_input_len: int | None = None
    chunked: bool = False
    packed: bool = True

    def longest_prompt(self, max_seq_len: int) -> tuple[int, str]:
        """The longest prompt the runtime admits, and the setting that decides (trtGptModel.h)."""
        if self.chunked:
            return max_seq_len - 1, "max_seq_len"
        if self.packed:
            return min((max_seq_len - 1, "max_seq_len"), (self.max_num_tokens, "max_num_tokens"))
        return self.max_input_len or max_seq_len - 1, "max_input_len"


@dataclass(frozen=True, slots=True)
class Case:
    """One pairing in the terms of the library.

    gpu: None where there is none; `claimed` says that the configuration names it, not this machine. algo: the
    library's name of the quantization, PLAIN for none, None where it has no such thing or the scheme is unknown.
    """

    backend: Backend
    release: str
    tp: int
    pp: int
    gpu: Gpu | None
    claimed: bool
    limits: Limits
    scores_prompts: bool
    pairing: Pairing
    method: str | None
    scheme: Scheme | None
    algo: str | None
    workers: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def named(self) -> str:
        """The scheme as people write it."""
        return "" if self.scheme is None else str(self.scheme)

    @property
    def architecture(self) -> str | None:
        return self.pairing.text("architecture")

    @property
    def max_seq_len(self) -> int | None:
        """Tokens of a request at most: as asked, else what the model knows; None where neither is known."""
        return self.limits.max_seq_len or self.pairing.number("max_positions")


def case(
    backend: Backend,
    release: str,
    parallel: tuple[int, int],
    gpu: Gpu | None,
    limits: Limits,
    *,
    scores_prompts: bool,
    pairing: Pairing,
    workers: int = 1,
) -> Case:
    """Put a pairing into the library's terms. `parallel` is (tp, pp); a GPU that is given stands for this machine's."""
    method, named = pairing.text("quant_method"), pairing.text("scheme")
    scheme = None if named is None else parse(named.partition(",")[0])
    promised = pairing.text("quant_algo")
    algo = promised if promised is not None else None if scheme is None else algorithm(scheme, method or "")
    return Case(
        backend, release, *parallel, gpu or gpu_of(pairing.device), gpu is not None, limits, scores_prompts, pairing,
        method, scheme, algo, workers,
    )  # fmt: skip


def algorithm(scheme: Scheme, method: str) -> str | None:
    """The library's QuantAlgo of a scheme, PLAIN for none; None where the library has no such thing."""
    if not scheme.quantized:
        return PLAIN
    if scheme.fp4:
        return {("NVFP4", 4): "NVFP4", ("MXFP4", None): "W4A16_MXFP4"}.get((scheme.fp4, scheme.activation_bits))
    if scheme.weight_type == "float":
        return _fp8(scheme)
    if scheme.activation_type == "int":
        return "W8A8_SQ_PER_CHANNEL"
    if scheme.activation_type == "float":
        return "W4A8_AWQ" if scheme.weight_bits == 4 else None
    if scheme.weight_bits == 4:
        # Converters call AutoAWQ's codes GPTQ with zero points; AWQ is ModelOpt's, with scales for inputs.
        return "W4A16_GPTQ" if method in ("gptq", "awq") else "W4A16_AWQ"
    if scheme.weight_bits == 8:
        return "W8A16_GPTQ" if method == "gptq" else "W8A16"
    return None


def _fp8(scheme: Scheme) -> str | None:
    if scheme.granularity == "block":
        return "FP8_BLOCK_SCALES"
    if scheme.granularity == "tensor":
        return "FP8" if scheme.activation_bits == 8 and not scheme.dynamic else None
    return "FP8_PER_CHANNEL_PER_TOKEN" if scheme.activation_bits == 8 and scheme.dynamic else None


def gpu_of(device: Mapping[str, str]) -> Gpu | None:
    """This machine's GPUs as one kind, None where there are none; of unlike ones the lowest capability counts."""
    sms, memory = device.get("gpu_sm", ""), device.get("gpu_memory_gib", "")
    if not sms or not memory:
        return None
    count = int(device.get("gpu_count", "1"))
    return Gpu(sm=min(map(int, sms.split(","))), count=count, memory_gib=float(memory))
