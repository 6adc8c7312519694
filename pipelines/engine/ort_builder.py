"""ONNX Runtime GenAI's own model builder, taught one thing: a quantized layer becomes MatMulNBits with its own codes.

The builder emits every other node. It never sees a dequantized checkpoint: quantized layers are placeholders, and
their codes are decoded while the graph's data file is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engine.ort_graph import CARRIER, DOMAIN, Blocks, stack_rows, stackable, to_blocks
from pipelines.errors import StageFailed
from pipelines.quantize.packing import Codes, QuantizedModules, dequantize

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Only what a test compared with transformers: of the others, OLMo computes something else and SmolLM3 fails.
BUILDERS = {
    "LlamaForCausalLM": "LlamaModel",
    "MistralForCausalLM": "MistralModel",
    "Qwen2ForCausalLM": "QwenModel",
    "Qwen3ForCausalLM": "Qwen3Model",
    "GemmaForCausalLM": "GemmaModel",
    "Gemma2ForCausalLM": "Gemma2Model",
    "GraniteForCausalLM": "GraniteModel",
}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
EMBEDDING = "model.embed_tokens.weight"


@dataclass
class Ledger:
    """Which modules each emitted matrix product holds, in the order their rows are stacked."""

    quantized: QuantizedModules
    accuracy_level: int
    names: dict[int, str] = field(default_factory=dict)
    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def name_of(self, module: object) -> str:
        """The module's name in the checkpoint, "" for one the builder made up."""
        return self.names.get(id(module), "")

    def held(self, *modules: object) -> list[str]:
        """The names of those modules, [] unless every one is quantized."""
        names = [self.name_of(m) for m in modules]
        return names if all(n in self.quantized for n in names) else []


def build_graph(
    variant: Path, out: Path, model: PreTrainedModel, quantized: QuantizedModules, accuracy_level: int
) -> dict[str, tuple[str, ...]]:
    """Write model.onnx, its data file and genai_config.json into `out`; say which modules each node holds.

    `model` gives the unquantized tensors and the modules' order; its quantized layers' weights are never read.

    Raises:
        StageFailed: the builder cannot export this architecture, or left a quantized layer out.
    """
    ledger = Ledger(quantized, accuracy_level, {id(m): n for n, m in model.named_modules()})
    with _staged(variant, out) as staged:
        _run_builder(staged, out, model, ledger)
    lost = sorted(set(quantized) - {name for names in ledger.nodes.values() for name in names})
    if lost:
        raise StageFailed(f"{variant}: {len(lost)} quantized layers have no node in the graph: {', '.join(lost[:5])}")
    return ledger.nodes


def copy_tokenizer(variant: Path, out: Path, max_length: int) -> None:
    """Copy the tokenizer as it is, but for a model_max_length too large for the runtime's integer."""
    for name in TOKENIZER_FILES:
        if (variant / name).is_file():
            shutil.copyfile(variant / name, out / name)
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    if int(settings.get("model_max_length", 0)) > 2**31:
        path.write_text(json.dumps(settings | {"model_max_length": max_length}, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def _staged(variant: Path, out: Path) -> Iterator[Path]:
    """A directory of the variant's small files, told nothing of its quantization; gone afterwards."""
    staged = out / ".build"
    staged.mkdir()
    try:
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if (variant / name).is_file():
                shutil.copyfile(variant / name, staged / name)
        config = json.loads((variant / "config.json").read_text())
        config.pop("quantization_config", None)
        (staged / "config.json").write_text(json.dumps(config))
        yield staged
    finally:
        shutil.rmtree(staged)


def _run_builder(staged: Path, out: Path, model: PreTrainedModel, ledger: Ledger) -> None:
    import onnx_ir as ir
    from onnxruntime_genai.models import builder

    architecture = model.config.architectures[0]
    if architecture not in BUILDERS:
        raise StageFailed(f"{architecture} cannot be exported (exported: {', '.join(sorted(BUILDERS))})")
    cache = str(staged / "cache")
    options = builder.parse_extra_options("", str(staged), str(out), "fp32", "cpu", cache, ["windowed_kv_cache=false"])
    options.pop("_effective_builder_config", None)
    details = options.pop("hf_details")
    config, extra = details["hf_config"], details["extra_kwargs"]
    kind = type("Carrying", (_Carrying, getattr(builder, BUILDERS[architecture])), {"ledger": ledger, "given": model})
    export = kind(config, ir.DataType.FLOAT, ir.DataType.FLOAT, "cpu", cache, options)
    export.make_model(str(staged))
    export.save_model(str(out))
    export.make_genai_config(config, extra, str(out))


class _Carrying:
    """Mixed in before one of the builder's model classes; overrides how a matrix product is emitted."""

    ledger: Ledger
    given: PreTrainedModel
    model: Any
    make_node: Any
    make_value: Any
    make_hidden_state_shape: Any
    io_dtype: Any

    def load_weights(self, input_path: str) -> PreTrainedModel:  # noqa: ARG002
        """Use the model given instead of loading one."""
        return self.given

    def make_matmul_op(self, matmul: torch.nn.Linear, basename: str, root_input: str, **kwargs: Any) -> str:
        """Emit one layer's product."""
        held = self.ledger.held(matmul)
        if held:
            return self._emit(held, basename, root_input, **kwargs)
        self._note(basename, matmul)
        return str(super().make_matmul_op(matmul, basename, root_input, **kwargs))  # type: ignore[misc]

    def make_packed_matmul(
        self, q: torch.nn.Linear, k: torch.nn.Linear, v: torch.nn.Linear, basename: str, root_input: str, **kwargs: Any
    ) -> str:
        """Emit one product for q, k and v."""
        held = self.ledger.held(q, k, v)
        if held:
            return self._emit(held, basename, root_input, **kwargs)
        self._note(basename, q, k, v)
        return str(super().make_packed_matmul(q, k, v, basename, root_input, **kwargs))  # type: ignore[misc]

    def is_qkv_projection_packable(self, layer_id: int, attention: Any) -> bool:
        """One product for q, k and v where all are quantized alike, or none is."""
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        held = self.ledger.held(*projections)
        if not held:
            none = not any(self.ledger.held(p) for p in projections)
            return none and bool(super().is_qkv_projection_packable(layer_id, attention))  # type: ignore[misc]
        layers = [self.ledger.quantized[name] for name in held]
        codes = [layer for layer in layers if isinstance(layer, Codes)]
        return not codes or (len(codes) == len(layers) and stackable(codes))

    def _emit(self, held: list[str], basename: str, root_input: str, **kwargs: Any) -> str:
        layers = [self.ledger.quantized[name] for name in held]
        codes = [layer for layer in layers if isinstance(layer, Codes)]
        out = sum(self.ledger.quantized.shape(name)[0] for name in held)
        name, operator, root = basename, {"op_type": "MatMul"}, root_input
        if len(codes) == len(layers):
            blocks = to_blocks(stack_rows(codes))
            name = f"{basename}NBits"
            operator = self._operator(blocks)
            root = self._reordered(blocks, basename, self._multiplied(blocks, basename, root_input))
            constants = self._constants(held, blocks, name)
        else:
            constants = [self._dequantized(held, basename, out)]
        self.ledger.nodes[name] = tuple(held)
        self._product(operator, [root, *constants], name, out, **kwargs)
        return name

    def _operator(self, blocks: Blocks) -> dict[str, Any]:
        out, columns = blocks.shape
        sizes = {"K": columns, "N": out, "bits": blocks.bits, "block_size": blocks.block_size}
        return {"op_type": CARRIER, "domain": DOMAIN, "accuracy_level": self.ledger.accuracy_level, **sizes}

    def _constants(self, held: list[str], blocks: Blocks, name: str) -> list[str]:
        """Register a layer's blocks: the small ones are held, the codes decoded again when the file is written."""
        quantized = self.ledger.quantized

        def weight() -> Any:
            return to_blocks(stack_rows([c for n in held if isinstance(c := quantized[n], Codes)])).weight

        prefix = name[1:].replace("/", ".")
        names = [self._lazy(f"{prefix}.qweight", weight, blocks.weight), self._now(f"{prefix}.scales", blocks.scales)]
        return names if blocks.zeros is None else [*names, self._now(f"{prefix}.qzeros", blocks.zeros)]

    def _multiplied(self, blocks: Blocks, basename: str, root_input: str) -> str:
        """Multiply the input as the quantizer did when it made the weights."""
        if blocks.pre_scale is None:
            return root_input
        name = f"{basename}/PreScale"
        factor = self._now(f"{name[1:].replace('/', '.')}.factor", blocks.pre_scale)
        return self._input_changed("Mul", name, [root_input, factor], len(blocks.pre_scale))

    def _reordered(self, blocks: Blocks, basename: str, root_input: str) -> str:
        """Put the input's columns in the order of the groups, where the quantizer reordered them."""
        if blocks.columns is None:
            return root_input
        name = f"{basename}/Reorder"
        index = self._now(f"{name[1:].replace('/', '.')}.columns", blocks.columns)
        return self._input_changed("Gather", name, [root_input, index], len(blocks.columns), axis=-1)

    def _input_changed(self, operator: str, name: str, inputs: list[str], width: int, **attributes: Any) -> str:
        output = f"{name}/output_0"
        self.make_node(operator, inputs=inputs, outputs=[output], name=name, **attributes)
        self.make_value(output, self.io_dtype, shape=self.make_hidden_state_shape(last_dim=width))
        return output

    def _dequantized(self, held: list[str], basename: str, out: int) -> str:
        import numpy as np

        quantized = self.ledger.quantized

        def weight() -> Any:
            return np.ascontiguousarray(np.concatenate([dequantize(quantized[n]) for n in held]).T)

        shape = np.broadcast_to(np.float32(0), (quantized.shape(held[0])[1], out))
        return self._lazy(f"{basename[1:].replace('/', '.')}.weight", weight, shape)

    def _product(self, operator: dict[str, Any], inputs: list[str], name: str, out: int, **kwargs: Any) -> None:
        output = "logits" if kwargs.get("logits") else f"{name}/output_0"
        self.make_node(inputs=inputs, outputs=[output], name=name, **operator)
        sequence = kwargs.get("seq_dim", "sequence_length")
        self.make_value(output, self.io_dtype, shape=self.make_hidden_state_shape(seq_dim=sequence, last_dim=out))

    def _note(self, node: str, *modules: object) -> None:
        names = tuple(self.ledger.name_of(m) for m in modules)
        if all(names):
            self.ledger.nodes[node] = names

    def _now(self, name: str, value: Any) -> str:
        return self._lazy(name, lambda: value, value)

    def _lazy(self, name: str, value: Any, like: Any) -> str:
        import onnx_ir as ir

        dtype, shape = ir.DataType.from_numpy(like.dtype), ir.Shape(like.shape)
        tensor = ir.LazyTensor(lambda: ir.tensor(value(), name=name), dtype=dtype, shape=shape, name=name)
        held = self.make_value(name, dtype, shape)
        held.const_value = tensor
        self.model.graph.register_initializer(held)
        return name
