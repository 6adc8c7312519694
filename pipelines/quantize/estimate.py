"""How long quantizing takes and how much memory, before it is done: operations counted, and a rate for the machine.

The rates were fitted once to a model of 135 million parameters on two cores. What a quantizer took here the last time
corrects them (`conduct.Timings`), so they matter for the first plan on a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.quantize.scheme import matches

Shapes = Mapping[str, tuple[int, int]]
START_S = 11.0
"""Imports of torch, transformers and a library."""
START_BYTES = 450 * 2**20
"""What they take in memory."""
BYTES_PER_S = 1e9
"""Reading, casting, packing and writing weights."""
FLOPS_PER_CORE = 30e9
"""Float32 products on a core with AVX2."""
FLOPS_OF_GPU = 5e13
"""Taken for any GPU."""
COLUMN_S = 2e-4
"""One step of GPTQ, which goes through a layer's columns one by one, whatever their height."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What a method does to every layer.

    `passes` are forward passes over the calibration set, `tried` candidates of which each takes two more (scales, in
    AWQ), `hessian` says that columns are corrected by the inverse of the inputs' second moments (GPTQ). At most
    `samples` of the calibration set's are used, `batch` at once.
    """

    passes: int = 0
    tried: int = 0
    hessian: bool = False
    samples: int | None = None
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """Wall seconds and peak host memory of quantizing a base."""

    seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Job:
    """A base, what it is shown (`samples` sequences of `tokens`), and the machine: its cores, whether it has a GPU."""

    shapes: Shapes
    parameters: int
    stored_bytes: int
    hidden: int
    layers: int
    vocabulary: int
    samples: int
    tokens: int
    cores: int
    gpu: bool = False


def effort_of(options: Any, *, calibrated: bool, tried: int = 0, hessian: bool = False) -> Effort:
    """Read samples and batch from a library's options, by the names libraries have for them; two passes where there is
    data."""
    inner = getattr(options, "calibrate", options)
    most = getattr(inner, "num_calibration_samples", None) or getattr(inner, "max_calib_samples", None)
    together = getattr(inner, "batch_size", None) or getattr(inner, "n_parallel_calib_samples", None)
    return Effort(2 if calibrated else 0, tried, hessian, most, together or 1)


def estimate(job: Job, effort: Effort, ignore: tuple[str, ...] = ()) -> Estimate:
    """Estimate a run from counts of operations. T is tokens shown, a layer is [out, in].

    Forward passes take 2 T out in each; AWQ (arXiv 2306.00978) two of them for every candidate, one of each block that
    reads the scaled layer and one of the attention or network it is in. GPTQ (arXiv 2210.17323, section 3) takes 2 T
    in^2 for the second moments, 2 in^3 to invert them, and out in^2 to correct the columns still to come.

    Memory is that of the imports, the weights as computed (four bytes each without a GPU), and of the larger of two:
    the stored weights while they are read, or while calibrating one batch's logits and activations, what waits between
    layers, and one layer's second moments with their inverse.
    """
    layers = {name: shape for name, shape in job.shapes.items() if not matches(name, ignore)}
    sequences = min(job.samples, effort.samples or job.samples) if effort.passes else 0
    shown = sequences * job.tokens
    weights = sum(out * columns for out, columns in layers.values())
    flops = float(2 * shown * weights * (effort.passes + 2 * effort.tried))
    steps = 0
    if effort.hessian:
        flops += sum(columns**2 * (2 * shown + 2 * columns + out) for out, columns in layers.values())
        steps = sum(columns for _, columns in layers.values())
    rate = FLOPS_OF_GPU if job.gpu else job.cores * FLOPS_PER_CORE
    moved = 3 * job.stored_bytes
    seconds = START_S + moved / BYTES_PER_S + flops / rate + steps * COLUMN_S
    return Estimate(seconds, _memory(job, effort, layers, shown))


def _memory(job: Job, effort: Effort, layers: Shapes, shown: int) -> int:
    computed = job.parameters * (2 if job.gpu else 4)
    batch = min(effort.batch * job.tokens, shown)
    widest = max((max(shape) for shape in layers.values()), default=0)
    calibrating = 6 * batch * job.vocabulary + 4 * (4 * batch * widest + 2 * shown * job.hidden)
    if effort.hessian:
        calibrating += 8 * sum(columns**2 for _, columns in layers.values()) // max(1, job.layers)
    return START_BYTES + computed + max(job.stored_bytes, calibrating if shown else 0)
