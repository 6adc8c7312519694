"""What serving takes in memory: weights by their scheme, keys and values by token. Pure arithmetic, shared by targets.

Activations, graphs and the runtime itself are left out, so what fits by these figures may still not fit; what does not
fit by them surely does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pipelines.engine.pairing import Pairing
from pipelines.errors import Problem
from pipelines.quantize.scheme import Scheme, parse

GIB = 2**30
WIDTHS = {"float32": 4.0, "f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}
"""Bytes of a number in a cache, by the formats' names: q8_0 has a 2-byte scale for 32, NVFP4 a 1-byte one for 16."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How an engine keeps what it serves, in bytes a number.

    place: the memory it lies in. other: what is not quantized. scale: of a group's scale. floats: what quantized floats
    are kept at; None: as the scheme says. cache: keys and values. slots: requests at once at most, None for no limit.
    ranks: devices it is shared over. reserved: bytes that are kept for the cache whatever is asked, on each of them.
    device_gib: of one device, where it is not this machine's.
    """

    place: Literal["host", "gpu"]
    other: float = 2
    scale: float = 2
    floats: float | None = None
    cache: float = 2
    slots: int | None = None
    ranks: int = 1
    reserved: int | None = None
    device_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an engine takes when all requests under way are at their longest at once: an upper bound of its cache.

    weights, cache: bytes, in all. token: bytes of one token's keys and values. requests: at once, each of `tokens`.
    device: bytes of one device's memory. What is unknown is None.
    """

    place: Literal["host", "gpu"]
    ranks: int
    weights: int
    token: int | None
    requests: int
    tokens: int | None
    cache: int | None
    device: int | None

    @property
    def each(self) -> int:
        """Bytes on one device, as far as they are known."""
        return (self.weights + (self.cache or 0)) // self.ranks

    @property
    def fits(self) -> bool | None:
        """Whether it does, None where the device or the model's shape is unknown."""
        return None if self.device is None or self.cache is None else self.each <= self.device


def weight_bytes(
    parameters: int,
    linear: int,
    scheme: Scheme | None,
    *,
    other: float = 2,
    scale: float = 2,
    floats: float | None = None,
) -> int:
    """What weights take: `linear` of them by their scheme with a scale for each group, the rest at `other` each."""
    each = other
    if scheme is not None and scheme.quantized:
        emulated = floats is not None and scheme.weight_type == "float"
        group = scheme.group_size if scheme.granularity == "group" else None
        each = floats if emulated and floats is not None else scheme.weight_bits / 8 + (scale / group if group else 0)
    return int(linear * each + max(parameters - linear, 0) * other)


def weights_of(pairing: Pairing, storage: Storage) -> int:
    """The same of a pairing's base under its scheme; 0 where the base is unknown."""
    named, linear = pairing.text("scheme"), sum(out * into for out, into in pairing.linear_shapes.values())
    scheme = None if named is None else parse(named.partition(",")[0])
    parameters = pairing.number("parameters") or 0
    return weight_bytes(parameters, linear, scheme, other=storage.other, scale=storage.scale, floats=storage.floats)


def token_bytes(pairing: Pairing, each: float) -> int | None:
    """Keys and values of one token over all layers, at `each` bytes a number; None where the model's shape is unknown.

    Of plain attention 2 layers kv_heads head_dim; with latents (DeepSeek's MLA) layers (rank + rotary part).
    """
    layers, width = pairing.number("layers"), _width(pairing)
    return None if not layers or not width else round(layers * width * each)


def _width(pairing: Pairing) -> int:
    """Numbers that a layer keeps of a token, 0 where that is unknown."""
    told = pairing.number("kv_width")
    hidden, heads, kv_heads = (pairing.number(name) or 0 for name in ("hidden_size", "heads", "kv_heads"))
    return told if told is not None else 2 * kv_heads * (hidden // heads) if heads else 0


def footprint(pairing: Pairing, storage: Storage) -> Footprint:
    """Put a campaign's traffic into an engine's memory."""
    asked, token = pairing.workload, token_bytes(pairing, storage.cache)
    requests = asked.in_flight if storage.slots is None else min(asked.in_flight, storage.slots)
    tokens = None if asked.request is None else asked.request.tokens
    cache = None if token is None or tokens is None else token * tokens * requests
    if storage.reserved is not None:
        cache = storage.reserved * storage.ranks
    told = pairing.device.get("gpu_memory_gib" if storage.place == "gpu" else "memory_gib")
    gib = storage.device_gib if storage.device_gib is not None else None if told is None else float(told)
    device = None if gib is None else int(gib * GIB)
    weights = weights_of(pairing, storage)
    return Footprint(storage.place, storage.ranks, weights, token, requests, tokens, cache, device)


def too_large(found: Footprint, key: str, value: object, allowed: str = "") -> Iterator[Problem]:
    """What cannot be served at all: weights, and keys and values of one request, without which nothing is answered."""
    if found.device is None:
        return
    one = (found.token or 0) * (found.tokens or 0)
    if (found.weights + one) / found.ranks > found.device:
        what = "the machine" if found.place == "host" else "a GPU"
        message = f"weights take about {found.weights / found.ranks / GIB:.1f} GiB"
        message += f" and one request {one / found.ranks / GIB:.1f}" if one else ""
        yield Problem(key, value, f"{message}; {what} has {found.device / GIB:g} GiB", allowed)
