"""What the host adds to a decoder graph, and where it lets a graph be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from pipelines.engine.host import surgery
from pipelines.errors import InputError


def graph_file(where: Path, after_head: str = "", **attention: int) -> Path:
    """A graph of attention, a head, and perhaps something that shapes the head's output; it is read, never run."""
    held = {"num_heads": 1, "kv_num_heads": 1, "do_rotary": 1, **attention}
    nodes = [
        helper.make_node("GroupQueryAttention", ["x", "", ""], ["h"], domain="com.microsoft", **held),
        helper.make_node("MatMul", ["h", "w"], ["raw" if after_head else "logits"], name="head"),
    ]
    nodes += [helper.make_node(after_head, ["raw"], ["logits"])] if after_head else []
    shape: list[Any] = ["b", "s", 4]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)
    path = where / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [logits])), str(path))
    return path


def inputs(opened: surgery.Opened) -> list[str]:
    return [i.name for i in onnx.load_from_string(opened.graph).graph.input]


@pytest.mark.parametrize("after_head", ["", "Tanh"])
def test_rows_are_chosen_in_front_of_the_head(after_head: str, tmp_path: Path) -> None:
    """The Gather feeds the head, also where something shapes what comes out of it; the file is untouched."""
    path = graph_file(tmp_path, after_head)
    before = path.read_bytes()
    opened = surgery.open_up(path, "logits")
    nodes = {n.name: n for n in onnx.load_from_string(opened.graph).graph.node}
    assert ["h", surgery.READ] == list(nodes[surgery.READ].input)
    assert nodes["head"].input[0] == nodes[surgery.READ].output[0]
    assert ["x", surgery.READ, surgery.POSITIONS, surgery.BIAS] == inputs(opened)
    assert before == path.read_bytes()


@pytest.mark.parametrize("attention", [{"local_window_size": 128}, {"do_rotary": 0}])
def test_attention_that_a_mask_would_mislead_gets_none(attention: dict[str, int], tmp_path: Path) -> None:
    """A window counts cache slots, not positions; positions applied elsewhere cannot be given here."""
    opened = surgery.open_up(graph_file(tmp_path, **attention), "logits")
    assert not opened.branches
    assert ["x", surgery.READ] == inputs(opened)


def test_what_is_no_decoder_graph_is_refused(tmp_path: Path) -> None:
    """An unreadable file and a graph without a head are told apart."""
    path = graph_file(tmp_path)
    with pytest.raises(InputError, match="no matrix product makes 'scores'"):
        surgery.open_up(path, "scores")
    path.write_bytes(b"\x00not a graph")
    with pytest.raises(InputError, match="cannot be read as an ONNX graph"):
        surgery.open_up(path, "logits")
