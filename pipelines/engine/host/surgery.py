"""A decoder graph as its file has it, opened up in memory: logits for chosen rows only, and branches side by side.

The engine's files stay as they are. What is added are inputs that ONNX Runtime's operators already have:
GroupQueryAttention's `position_ids` and `attention_bias`, and a Gather in front of the product with the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.errors import InputError

if TYPE_CHECKING:
    import onnx

ATTENTION = "GroupQueryAttention"
HEADS = ("MatMul", "FusedMatMul", "MatMulNBits", "Gemm")
# Places of GroupQueryAttention's optional inputs (com.microsoft, version 1).
POSITIONS_AT, BIAS_AT = 9, 10
READ, BIAS, POSITIONS = "quantgate.read", "quantgate.attention_bias", "position_ids"


@dataclass(frozen=True, slots=True)
class Opened:
    """An edited graph without its weights. `branches`: whether one call may hold tokens that do not see each other."""

    graph: bytes
    branches: bool


def open_up(path: Path, logits: str) -> Opened:
    """Add the inputs `quantgate.read` (int64 [R]: rows to compute logits for) and, where attention allows it,
    `quantgate.attention_bias` (float [B, 1, S, T]) with `position_ids` (int64 [B, S]).

    Raises:
        InputError: the file is no ONNX graph, or nothing in it makes logits from hidden states.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError) as error:
        raise InputError(f"{path}: cannot be read as an ONNX graph: {error}") from None
    _read_some_rows(model.graph, logits, path)
    branches = _may_branch(model.graph)
    if branches:
        _let_branch(model.graph)
    return Opened(model.SerializeToString(), branches)


def _read_some_rows(graph: onnx.GraphProto, logits: str, path: Path) -> None:
    """Gather rows where hidden states enter the last matrix product, whatever shapes its output afterwards."""
    from onnx import TensorProto, helper

    producers = {name: node for node in graph.node for name in node.output}
    node = producers.get(logits)
    while node is not None and node.op_type not in HEADS:
        node = next((producers[name] for name in node.input if name in producers), None)
    if node is None:
        raise InputError(f"{path}: no matrix product makes {logits!r} from hidden states")
    graph.input.append(helper.make_tensor_value_info(READ, TensorProto.INT64, ["rows_read"]))
    before = node.input[0]
    node.input[0] = f"{before}/read"
    pick = helper.make_node("Gather", [before, READ], [node.input[0]], name=READ, axis=1)
    graph.node.insert(next(i for i, n in enumerate(graph.node) if n is node or n.name == node.name), pick)
    for output in graph.output:
        if output.name == logits:
            output.type.tensor_type.shape.dim[1].dim_param = "rows_read"


def _may_branch(graph: onnx.GraphProto) -> bool:
    """Attention that turns positions itself, sees everything before a token, and has its bias to spare."""
    nodes = [node for node in graph.node if node.op_type == ATTENTION]
    return bool(nodes) and all(_is_plain(node) for node in nodes) and POSITIONS not in {i.name for i in graph.input}


def _is_plain(node: onnx.NodeProto) -> bool:
    held = {a.name: a.i for a in node.attribute}
    spare = all(len(node.input) <= at or not node.input[at] for at in (POSITIONS_AT, BIAS_AT))
    return held.get("do_rotary") == 1 and held.get("local_window_size", -1) == -1 and spare


def _let_branch(graph: onnx.GraphProto) -> None:
    from onnx import TensorProto, helper

    graph.input.append(helper.make_tensor_value_info(POSITIONS, TensorProto.INT64, ["batch_size", "sequence_length"]))
    shape = ["batch_size", 1, "sequence_length", "total_sequence_length"]
    graph.input.append(helper.make_tensor_value_info(BIAS, TensorProto.FLOAT, shape))
    for node in graph.node:
        if node.op_type == ATTENTION:
            node.input.extend([""] * (BIAS_AT + 1 - len(node.input)))
            node.input[POSITIONS_AT], node.input[BIAS_AT] = POSITIONS, BIAS
