"""Compile an ONNX graph with TensorRT-RTX: a program of its own, run as `python -I -c <this text>` beside the graph.

The library orders what it writes by addresses in memory. So equal graphs give equal engines only where addresses are
equal too: in a new process without randomized addresses, that knows no path and no variable of whoever asks.
It reads the request from stdin and writes the engine to stdout; the last line of stderr is why there is none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

REFUSED = 3
MODEL = "model.onnx"
Shapes = tuple[list[int], list[int], list[int]]


def shapes(limits: dict[str, int], name: str, shape: Sequence[int]) -> Shapes:
    """The least, usual and largest shape of an input: decoding one token after half a sequence is the usual case.

    `limits` are batch, prompt and length. Free dimensions are -1: batch first, then tokens, or of a cache those before.
    """
    corners = (
        (1, 1, 0),
        (1, 1, limits["length"] // 2),
        (limits["batch"], limits["prompt"], limits["length"] - 1),
    )
    found = []
    for batch, tokens, before in corners:
        second = tokens + before if name == "attention_mask" else tokens
        free = [batch, before if name.startswith("past_key_values.") else second]
        found.append([free.pop(0) if size == -1 else size for size in shape])
    return found[0], found[1], found[2]


def main() -> int:
    """Compile as asked."""
    engine = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no part of the engine
    asked = json.load(sys.stdin)
    errors: list[str] = []
    compiled = _compiled(asked, errors)
    if compiled is None:
        print("; ".join(" ".join(e.split()) for e in errors) or "it did not say why", file=sys.stderr)
        return REFUSED
    engine.write(compiled)
    engine.close()
    return 0


def _compiled(asked: dict[str, Any], errors: list[str]) -> Any:
    """The engine as the library holds it, None where it refuses; `errors` are its words."""
    import tensorrt_rtx as trt

    class Keeping(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                errors.append(message)
            elif severity != trt.ILogger.Severity.VERBOSE:
                print(message, file=sys.stderr)

    logger = Keeping()
    builder = trt.Builder(logger)
    network = builder.create_network()
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(MODEL):
        return None
    options = builder.create_builder_config()
    options.num_compute_capabilities = len(asked["capabilities"])
    for index, sm in enumerate(asked["capabilities"]):
        options.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
    if asked["optimization_level"] is not None:
        options.builder_optimization_level = asked["optimization_level"]
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        given = network.get_input(index)
        profile.set_shape(given.name, *shapes(asked["limits"], given.name, list(given.shape)))
    options.add_optimization_profile(profile)
    return builder.build_serialized_network(network, options)


if __name__ == "__main__":
    sys.exit(main())
