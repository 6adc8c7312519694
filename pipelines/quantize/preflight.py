"""What can be said against a campaign's variants before one is made: from schemes, lists of layers and libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pipelines.errors import Problem
from pipelines.quantize.checks import HEAD
from pipelines.quantize.coverage import naming_problems
from pipelines.quantize.scheme import Scheme, misfit_problems, parse
from pipelines.quantize.table import Quantizer

if TYPE_CHECKING:
    from pipelines.intake.checkpoint import Inspected


class Asked(Protocol):
    """A variant of a campaign, as far as it matters here."""

    @property
    def name(self) -> str: ...
    @property
    def row(self) -> Quantizer: ...
    @property
    def config(self) -> Any: ...
    @property
    def scheme(self) -> Scheme: ...


def problems(variants: Sequence[Asked], base: Inspected) -> list[Problem]:
    """Everything that schemes, ignore lists and libraries have against a base, with keys of the campaign."""
    return [*_misfits(variants, base), *_namings(variants, base), *_refusals(variants, base)]


def _misfits(variants: Sequence[Asked], base: Inspected) -> Iterator[Problem]:
    """Layers that a scheme does not fit; variants that share a scheme share the look at every layer."""
    first: dict[tuple[Scheme, tuple[str, ...]], list[Problem]] = {}
    for variant in variants:
        key = f"variant.{variant.name}.scheme"
        kind = variant.scheme, tuple(getattr(variant.config, "ignore", ()))
        if kind not in first:
            first[kind] = misfit_problems(key, kind[0], base.linear_shapes, kind[1])
        yield from (Problem(key, p.value, p.message, p.allowed) for p in first[kind])
        head = getattr(variant.config, "head", None)
        if head and base.vocab_size and base.hidden_size:
            shape = {HEAD: (base.vocab_size, base.hidden_size)}  # one that shares the embedding's tensor is in no file
            yield from misfit_problems(f"variant.{variant.name}.head", parse(head), shape)


def _namings(variants: Sequence[Asked], base: Inspected) -> Iterator[Problem]:
    """Entries of ignore and target lists that name no layer; variants that share lists share the look."""
    first: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Problem]] = {}
    for variant in variants:
        lists = tuple(getattr(variant.config, "targets", ())), tuple(getattr(variant.config, "ignore", ()))
        if variant.scheme.quantized and lists not in first:
            first[lists] = naming_problems("", *lists, base.linear_shapes, base.fused_experts)
        for p in first[lists] if variant.scheme.quantized else ():
            yield Problem(f"variant.{variant.name}.{p.key}", p.value, p.message, p.allowed)


def _refusals(variants: Sequence[Asked], base: Inspected) -> Iterator[Problem]:
    """What the quantizers' libraries have against the base."""
    for variant in variants:
        for p in variant.row.preflight(variant.config, base):
            yield Problem(f"variant.{variant.name}.{p.key}", p.value, p.message, p.allowed)
