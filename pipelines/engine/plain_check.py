"""Whether a plain graph is the variant: the same codes and scales to the last bit, the same logits, cache or not.

It is run by ONNX Runtime on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engine.plain_codes import CODES, FACTOR, SCALES
from pipelines.engine.plain_nodes import numpy_type
from pipelines.quantize.codes import dequantize
from pipelines.quantize.packing import QuantizedModules

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAST, PRESENT = "past_key_values.", "present."


def differing(file: Path, quantized: QuantizedModules, dtype: str) -> Iterator[str]:
    """Name each tensor whose constant in a written graph is not the variant's to the last bit."""
    import numpy as np
    import onnx_ir as ir

    constants = ir.load(str(file)).graph.initializers
    held = {name: value.const_value for name, value in constants.items() if value.const_value is not None}

    def floats(name: str) -> NDArray[np.float32]:
        return np.asarray(held[name].numpy(), np.float32)

    for module in quantized:
        layer = quantized[module]
        columns = f"{module}/columns"
        order = held[columns].numpy() if columns in held else slice(None)
        wanted = dequantize(replace(layer, pre_scale=None))[:, order]
        if not np.array_equal(wanted, _multiplied(floats(f"{module}/{CODES}"), floats(f"{module}/{SCALES}"))):
            yield module
        if layer.pre_scale is not None and not np.array_equal(layer.pre_scale, floats(f"{module}/{FACTOR}")):
            yield f"{module}/{FACTOR}"
    for name in (n for n in quantized.shards if n in held):
        if not np.array_equal(quantized.shards[name].astype(numpy_type(dtype)), held[name].numpy()):
            yield name


def _multiplied(codes: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Codes times scales, as DequantizeLinear has it: scales [out, groups], [out] or []."""
    if scales.ndim < 2:
        return codes * (scales[:, None] if scales.ndim else scales)
    blocks = codes.reshape(len(codes), scales.shape[1], -1) * scales[:, :, None]
    return blocks.reshape(codes.shape)


class Runner:
    """A graph in float32, run window by window."""

    def __init__(self, file: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # Beyond basic, integer codes become products that round their inputs to 8 bits.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._names = [output.name for output in self._session.get_outputs()]

    def logits(self, ids: NDArray[np.integer]) -> NDArray[np.float32]:
        """Logits [length, vocabulary] of one window in one call."""
        return self._step(ids, {})[0]

    def logits_by_cache(self, ids: NDArray[np.integer]) -> NDArray[np.float32]:
        """The same in three calls: half of the window, all but its last token, and that one."""
        import numpy as np

        rows: list[NDArray[np.float32]] = []
        cache: dict[str, Any] = {}
        for start, end in pairwise((0, len(ids) // 2, len(ids) - 1, len(ids))):
            found, cache = self._step(ids[start:end], cache, start)
            rows.append(found)
        return np.concatenate(rows)

    def _step(
        self, ids: NDArray[np.integer], cache: dict[str, Any], start: int = 0
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        import numpy as np

        given: dict[str, Any] = {
            "input_ids": np.asarray(ids, np.int64)[None],
            "attention_mask": np.ones((1, start + len(ids)), np.int64),
            "position_ids": np.arange(start, start + len(ids))[None],
        }
        for wanted in self._session.get_inputs():
            if wanted.name.startswith(PAST):
                empty = np.zeros((1, wanted.shape[1], 0, wanted.shape[3]), np.float32)
                given[wanted.name] = cache.get(wanted.name.replace(PAST, PRESENT), empty)
        found = dict(zip(self._names, self._session.run(None, given), strict=True))
        return found.pop("logits")[0], found
