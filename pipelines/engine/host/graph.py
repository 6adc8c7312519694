"""An ONNX Runtime GenAI decoder graph with its key-value cache, run by ONNX Runtime itself.

The cache is one block per layer, (rows, heads, capacity, head size), read and written in place: row b of a batch is
row b of the block, so one sequence is a slice of it and sequences of different lengths advance together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engine.host import surgery
from pipelines.engine.host.decoder import DecodeFailed
from pipelines.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import onnxruntime as ort
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

CAPACITY_STEP = 256
UNSEEN = -1e30  # finite: a sum with it stays a number, and its exponential beside any score is exactly zero
FLAGS = {"enable_cpu_mem_arena", "enable_mem_pattern", "use_deterministic_compute"}


class Graph:
    """A loaded decoder graph. `run` is the only thing that computes."""

    def __init__(self, engine_dir: Path, threads: int, spin: bool = False) -> None:
        """Load `genai_config.json` and the graph it names.

        Raises:
            InputError: the directory holds no such graph, or the graph wants inputs that this server does not feed.
        """
        model = _model_section(engine_dir)
        decoder = model["decoder"]
        self.vocab_size = int(model["vocab_size"])
        self.context_length = int(model["context_length"])
        self._layers = int(decoder["num_hidden_layers"])
        self._heads = int(decoder["num_key_value_heads"])
        self._head_size = int(decoder["head_size"])
        self._names: dict[str, str] = {**decoder["inputs"], **decoder["outputs"]}
        path = engine_dir / decoder["filename"]
        opened = surgery.open_up(path, self._names["logits"])
        self.branches = opened.branches
        self._session = _session(path, opened.graph, decoder.get("session_options", {}), threads, spin)
        self._wants_positions = self._check_inputs(path)
        self._logits: Floats | None = None
        self._no_bias: Floats | None = None

    def _check_inputs(self, path: Path) -> bool:
        """Refuse a graph with inputs we do not know; say whether it takes position ids."""
        inputs = {i.name: i.type for i in self._session.get_inputs()}
        fed = {self._names["input_ids"], self._names["attention_mask"], surgery.READ}
        fed |= {name for name, _ in self._cache_names()}
        fed |= {surgery.BIAS} if self.branches else set()
        positions = self._names.get("position_ids", surgery.POSITIONS)
        strange = sorted(set(inputs) - fed - {positions})
        if strange or not fed <= set(inputs):
            missing = sorted(fed - set(inputs))
            raise InputError(
                f"{path}: not a plain decoder graph: inputs not known {strange[:4]}, missing {missing[:4]}"
            )
        kinds = {inputs[name] for name, _ in self._cache_names()} | {o.type for o in self._session.get_outputs()}
        if kinds != {"tensor(float)"}:
            raise InputError(f"{path}: cache and logits must be float32 on a CPU, found {sorted(kinds)}")
        return positions in inputs

    def _cache_names(self) -> list[tuple[str, str]]:
        """Pairs (past, present) in the order of a cache's blocks."""
        kinds = (("past_key_names", "present_key_names"), ("past_value_names", "present_value_names"))
        return [
            (self._names[past].replace("%d", str(layer)), self._names[present].replace("%d", str(layer)))
            for layer in range(self._layers)
            for past, present in kinds
        ]

    def new_cache(self, rows: int) -> Cache:
        """Make an empty cache for `rows` sequences; it takes memory as they need it."""
        return Cache(self._session, self._cache_names(), rows, self._heads, self._head_size)

    def run(
        self,
        cache: Cache,
        row: int,
        ids: NDArray[np.int64],
        lengths: Sequence[int],
        read: Sequence[int] | None = None,
        branches: Branches | None = None,
    ) -> Floats:
        """Feed ids (B, S) to rows `row`.. of the cache that hold `lengths` tokens; give logits (B, R, V).

        `read` names the R of S rows whose logits are wanted, by default the last. The logits are a view that the next
        call overwrites. S > 1 only with B = 1. `branches` only where the graph has `branches` and the cache row tokens.

        Raises:
            DecodeFailed: ONNX Runtime refused, or memory ran out.
        """
        import numpy as np
        from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

        batch, steps = ids.shape
        total = max(lengths) + steps
        if row + batch > cache.rows or total > cache.capacity:
            raise DecodeFailed((), f"cache of {cache.rows} x {cache.capacity} has no room for {total} tokens")
        rows = np.array([steps - 1] if read is None else read, np.int64)
        binding = cache.binding(row, batch)
        mask = np.zeros((batch, total), np.int64)
        for i, length in enumerate(lengths):
            mask[i, : length + steps] = 1
        binding.bind_cpu_input(self._names["input_ids"], ids)
        binding.bind_cpu_input(self._names["attention_mask"], mask)
        binding.bind_cpu_input(surgery.READ, rows)
        if self._wants_positions:
            follow = np.asarray(lengths, np.int64)[:, None] + np.arange(steps)
            positions = follow if branches is None else branches.positions[None]
            binding.bind_cpu_input(self._names.get("position_ids", surgery.POSITIONS), positions)
        if self.branches:
            bias = self._nothing(batch, steps, total) if branches is None else branches.bias[None, None]
            binding.bind_cpu_input(surgery.BIAS, bias)
        logits = self._room(batch, len(rows))
        binding.bind_output(self._names["logits"], "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        try:
            self._session.run_with_iobinding(binding)
        except (
            ort_errors.Fail,
            ort_errors.RuntimeException,
            ort_errors.InvalidArgument,
            RuntimeError,
            MemoryError,
        ) as error:
            raise DecodeFailed((), f"{type(error).__name__}: {error}") from error
        return logits

    def _room(self, batch: int, rows: int) -> Floats:
        """A (B, R, V) view of the one logits buffer, made larger when needed."""
        import numpy as np

        wanted = batch * rows * self.vocab_size
        if self._logits is None or self._logits.size < wanted:
            self._logits = np.empty(wanted, np.float32)
        return self._logits[:wanted].reshape(batch, rows, self.vocab_size)

    def _nothing(self, batch: int, steps: int, total: int) -> Floats:
        """A (B, 1, S, T) view of zeros: a bias that changes nothing."""
        import numpy as np

        wanted = batch * steps * total
        if self._no_bias is None or self._no_bias.size < wanted:
            self._no_bias = np.zeros(wanted, np.float32)
        return self._no_bias[:wanted].reshape(batch, 1, steps, total)


@dataclass(frozen=True, slots=True)
class Branches:
    """Tokens of one call that belong to several branches: `positions` (S,) in their own texts, `bias` (S, T) zero for
    the cache slots that a token sees and `UNSEEN` for the others."""

    positions: NDArray[np.int64]
    bias: Floats


class Cache:
    """Keys and values of several sequences, in one block per layer and kind."""

    def __init__(self, session: ort.InferenceSession, names: list[tuple[str, str]], rows: int, *shape: int) -> None:
        self._session = session
        self._names = names
        self._heads, self._head_size = shape
        self.rows, self.capacity = rows, 0
        self._blocks: list[Floats] = []
        self._bindings: dict[tuple[int, int], Any] = {}

    def fit(self, tokens: int, held: Sequence[int] = ()) -> None:
        """Make room for sequences of `tokens` tokens, keeping the first `held[b]` tokens of each row b.

        Too large a cache is made smaller: attention clears a whole row when a sequence starts.
        """
        import numpy as np

        capacity = -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
        if capacity <= self.capacity <= 2 * capacity:
            return
        self._bindings.clear()
        shape = (self.rows, self._heads, capacity, self._head_size)
        old = self._blocks[::-1]
        self._blocks = []
        for _ in self._names:
            block = np.empty(shape, np.float32)
            if old:
                before = old.pop()
                for row, length in enumerate(held):
                    block[row, :, :length] = before[row, :, :length]
            self._blocks.append(block)
        self.capacity = capacity

    def gather(self, row: int, slots: Sequence[int], at: int) -> None:
        """Copy tokens of a row, by slot, to slots `at`.. of the same row."""
        for block in self._blocks:
            block[row, :, at : at + len(slots)] = block[row, :, list(slots)].swapaxes(0, 1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row over another."""
        for block in self._blocks:
            block[target, :, :length] = block[source, :, :length]

    def binding(self, row: int, count: int) -> Any:
        """Bind rows `row` to `row + count`, past and present to the same memory; made once per size."""
        import numpy as np

        if (row, count) not in self._bindings:
            made = self._session.io_binding()
            shape = (count, self._heads, self.capacity, self._head_size)
            for block, (past, present) in zip(self._blocks, self._names, strict=True):
                at = block.ctypes.data + row * block.strides[0]
                made.bind_input(past, "cpu", 0, np.float32, shape, at)
                made.bind_output(present, "cpu", 0, np.float32, shape, at)
            self._bindings[row, count] = made
        return self._bindings[row, count]


def _model_section(engine_dir: Path) -> dict[str, Any]:
    path = engine_dir / "genai_config.json"
    try:
        section: dict[str, Any] = json.loads(path.read_text())["model"]
    except FileNotFoundError:
        raise InputError(f"{engine_dir}: no genai_config.json: not an ONNX Runtime GenAI engine directory") from None
    except (json.JSONDecodeError, KeyError) as error:
        raise InputError(f"{path}: cannot be read: {error!r}") from None
    return section


def _session(path: Path, graph: bytes, wanted: dict[str, Any], threads: int, spin: bool) -> ort.InferenceSession:
    """Open the graph with the weights beside `path` and the engine's own session options, less its threads."""
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

    if any("cpu" not in provider for provider in wanted.get("provider_options", [])):
        raise InputError(f"{path}: built for {wanted['provider_options']}; this server runs CPU engines only")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    for name, value in {**wanted, **wanted.get("config_entries", {})}.items():
        if name in FLAGS:
            setattr(options, name, bool(value))
        elif "." in name:
            options.add_session_config_entry(name, str(value))
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    try:
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except (
        ort_errors.Fail,
        ort_errors.NoSuchFile,
        ort_errors.InvalidProtobuf,
        ort_errors.InvalidGraph,
        ort_errors.RuntimeException,
    ) as error:
        raise InputError(f"{path}: ONNX Runtime cannot load it: {error}") from None
