"""What can be said against an ONNX Runtime engine before a minute is spent on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.engine.memory import Storage, footprint, too_large
from pipelines.engine.ort_builder import BUILDERS
from pipelines.engine.ort_graph import BITS, SMALLEST_BLOCK
from pipelines.engine.pairing import Pairing
from pipelines.engine.traffic import too_long
from pipelines.errors import Problem, closest
from pipelines.quantize import scheme as schemes

if TYPE_CHECKING:
    from pipelines.engine.ort_genai import OrtGenaiConfig

READ_METHODS = ("", "compressed-tensors", "gptq", "awq", "modelopt")


def preflight(config: OrtGenaiConfig, pairing: Pairing) -> list[Problem]:
    """Find what would make a build, or the probe of what was built, fail.

    Looks at the facts architecture, scheme, quant_method, parameters and max_positions, as far as they are there.
    """
    found = []
    architecture, method = pairing.facts.get("architecture"), pairing.facts.get("quant_method", "")
    if architecture is not None and architecture not in BUILDERS:
        allowed = closest(str(architecture), BUILDERS)
        found.append(Problem("checkpoint.source", architecture, "ort_genai exports no such architecture", allowed))
    if method not in READ_METHODS:
        allowed = closest(str(method), [m for m in READ_METHODS if m])
        found.append(Problem("variant.quantizer", method, "ort_genai cannot carry codes of this method", allowed))
    if (named := pairing.text("scheme")) is not None:
        found += _scheme_problems(schemes.parse(named))
    known = pairing.number("max_positions")
    if known is not None and config.max_length > known:
        found.append(Problem("engine.max_length", config.max_length, f"the model knows {known} positions"))
    found += too_long(pairing.workload, config.max_length, "engine.max_length")
    found += too_large(footprint(pairing, storage(config, pairing)), "checkpoint.source", pairing.number("parameters"))
    return found


def storage(config: OrtGenaiConfig, pairing: Pairing) -> Storage:
    """Codes as they are; all else, quantized floats and the cache too, in float32."""
    del config, pairing
    return Storage("host", other=4, scale=4, floats=4, cache=4)


def _scheme_problems(scheme: schemes.Scheme) -> list[Problem]:
    if not scheme.quantized or scheme.weight_type == "float":
        return []
    if scheme.weight_bits not in BITS:
        return [
            Problem("variant.scheme", str(scheme), "ort_genai carries 4- and 8-bit codes", f"allowed: W{BITS} bits")
        ]
    if scheme.group_size is not None and scheme.group_size % SMALLEST_BLOCK:
        return [Problem("variant.scheme", str(scheme), f"group size must be a multiple of {SMALLEST_BLOCK}")]
    return []


def redundant(config: OrtGenaiConfig, scheme: schemes.Scheme) -> str | None:
    """Why this engine would be the same as the exact one for a scheme, None where it would not."""
    carried = scheme.quantized and scheme.weight_type == "int"
    if config.accuracy_level != 1 and not carried:
        return (
            f"accuracy_level={config.accuracy_level} changes only products of carried integer codes; {scheme} has none"
        )
    return None
