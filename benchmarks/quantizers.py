"""Every quantizer on the small real model, each in its toolchain: made, reloaded, set beside rounding to nearest."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outcome import conclude, conditions
from pydantic import BaseModel

from pipelines.assembly import CandidateSteps, assemble
from pipelines.campaign import Campaign, open_campaign
from pipelines.compose import compose
from pipelines.conduct import Timings, environment
from pipelines.config import CONF_DIR
from pipelines.errors import ConfigError
from pipelines.flow.executor import Outcome, execute
from pipelines.flow.inspection import look
from pipelines.flow.plan import plan
from pipelines.flow.store import Store, manifest
from pipelines.quantize import scheme as schemes
from pipelines.terminal import Watcher

QUICK = ("rtn_w4a16_g64", "fp8_dynamic")
CONTROL = "llmcompressor_rtn"
SETTINGS = (
    "calibration=quick", "held_out.windows=4", "engine=[ort_genai,llama_cpp]", "evalset=[ticket_json]",
    "divergence.prompts=0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A variant and what became of it; `why` says why there are no figures. `scheme` has the head's, if it has one."""

    variant: str
    quantizer: str
    scheme: str
    toolchain: str = ""
    library: str = ""
    seconds: float = 0.0
    rss_bytes: int = 0
    bits: float = 0.0
    ratio: float | None = None
    why: str = ""


def main() -> None:
    """Make, reload and measure; print the table and whether each 4-bit method is ahead of rounding."""
    given = _arguments()
    data, refused = _opened(given.variant or _chosen(given.quick), given.set)
    campaign = open_campaign(data)
    store = Store(Path(campaign.config.paths.store).resolve())
    rows = [*_run(campaign, store, make=given.make_toolchains), *refused]
    control = {row.scheme: row.ratio for row in rows if row.quantizer == CONTROL and row.ratio is not None}
    _print(rows, control)
    judged = [row for row in rows if _four_bit(row.scheme) and row.quantizer != CONTROL and row.ratio is not None]
    ahead = [row for row in judged if row.ratio is not None and row.ratio < control.get(row.scheme, 0.0)]
    tried = [row for row in rows if not row.why.startswith("not run")]
    conclude(
        "quantizers",
        conditions(("torch", "transformers"), quick=given.quick, **_shown(campaign)),
        {row.variant: _figures(row) for row in rows},
        {
            "share of variants tried that were made and reload": (
                sum(row.ratio is not None for row in tried) / max(1, len(tried)), ">=", 1.0,
            ),
            "share of 4-bit methods ahead of rounding at their scheme": (
                len(ahead) / len(judged) if judged else None if not given.quick else 1.0, ">=", 1.0,
            ),
        },
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two quantizers that read no data")
    parser.add_argument("--variant", nargs="+", metavar="NAME", help="these of conf/variant, instead of one a scheme")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides, as quantgate takes them")
    parser.add_argument("--make-toolchains", action="store_true", help="make environments that are missing")
    return parser.parse_args()


def _chosen(quick: bool) -> list[str]:
    """One variant of each quantizer and scheme: the first by name, so that the quick ones are left out."""
    if quick:
        return list(QUICK)
    first: dict[tuple[str, str, str], str] = {}
    for path in sorted((CONF_DIR / "variant").glob("*.yaml")):
        given = compose([f"variant=[{path.stem}]"])["variant"][path.stem]
        kind = (given["quantizer"], str(given.get("scheme")), str(given.get("head")))
        if given["quantizer"] != "baseline":
            first.setdefault(kind, path.stem)
    return list(first.values())


def _opened(names: Sequence[str], overrides: Sequence[str]) -> tuple[dict[str, Any], list[Row]]:
    """The campaign of these variants and their controls, without those that the base does not fit, which are told."""
    data = compose([*SETTINGS, *overrides, f"variant=[{','.join(['baseline', *names])}]"])
    data["variant"] |= _controls(data["variant"])
    data["variant"] = {name: {"engines": ["ort_genai"], **given} for name, given in data["variant"].items()}
    refused = []
    for name in list(data["variant"]):
        alone = data | {"variant": {n: data["variant"][n] for n in {"baseline", name}}}
        try:
            open_campaign(alone)
        except ConfigError as error:
            given = data["variant"].pop(name)
            why = "; ".join(str(p) for p in error.problems) or str(error)
            refused.append(Row(name, given["quantizer"], _scheme(given), why=f"not run: {why}"))
    return data, refused


def _scheme(given: Mapping[str, Any] | BaseModel) -> str:
    """A variant's scheme by its full name, and its head's."""
    data = given.model_dump() if isinstance(given, BaseModel) else given
    name, head = data.get("scheme", "BASE"), data.get("head")
    full = name if name == "BASE" else str(schemes.parse(name))
    return f"{full}, head {schemes.parse(head)}" if head else full


def _controls(variants: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rounding to nearest at every 4-bit integer scheme that a method is here with, as far as it is not among them."""
    there = {_scheme(v) for v in variants.values() if v["quantizer"] == CONTROL}
    found = {}
    for given in variants.values():
        name = _scheme(given)
        if _four_bit(name) and name not in there:
            there.add(name)
            short = name.lower().replace(", head ", "_head_")
            found[f"rounded_{short}"] = {"quantizer": CONTROL, "scheme": given["scheme"], "head": given.get("head")}
    return found


def _run(campaign: Campaign, store: Store, *, make: bool) -> list[Row]:
    store.prepare()
    timings = Timings(store)
    candidates = list({c.variant.name: c for c in assemble(campaign, {}, timings.seconds).candidates}.values())
    absent = {c.variant.name: why for c in candidates if (why := _absent(c, make=make))}
    there = [c for c in candidates if c.variant.name not in absent]
    wanted = plan([step for c in there for step in (c.quantized, c.checked)], store)
    with Watcher(len(wanted.to_run), wanted.seconds) as watch:
        outcomes = execute(wanted, store, watch, environment(campaign))
    timings.learn(outcomes.values(), store)
    rows = []
    for c in candidates:
        row = Row(c.variant.name, c.variant.row.name, _scheme(c.variant.config), c.variant.toolchain.name)
        if c.variant.name in absent:
            rows.append(replace(row, why=f"not run: {absent[c.variant.name]}"))
        elif c.variant.name != campaign.config.reference:
            rows.append(_row(row, c, outcomes, store))
    return rows


def _absent(candidate: CandidateSteps, *, make: bool) -> str:
    """Why a variant's toolchain cannot be used, "" where it can."""
    found = look(candidate.variant.toolchain)
    if found.state == "ready" or (make and found.state == "missing"):
        return ""
    return f"toolchain {found.name}: {found.what}; {found.to_do}"


def _row(row: Row, c: CandidateSteps, outcomes: Mapping[str, Outcome], store: Store) -> Row:
    for step in (c.quantized, c.checked):
        if outcomes[step.key].state in ("failed", "skipped"):
            return replace(row, why=f"{outcomes[step.key].state}: {outcomes[step.key].message}")
    made = manifest(store.path("variant", c.quantized.key))
    reloaded = manifest(store.path("reference", c.checked.key)).facts
    perplexity, base = reloaded["perplexity"], reloaded["base_perplexity"]
    bits = made.facts["bits_per_linear_weight"]
    return replace(
        row,
        library=f"{made.facts['library']} {made.facts['library_version']}",
        seconds=made.seconds,
        rss_bytes=made.peak_rss,
        bits=float(bits) if isinstance(bits, int | float) else 0.0,
        ratio=float(perplexity) / float(base)
        if isinstance(perplexity, int | float) and isinstance(base, int | float)
        else None,
    )


def _four_bit(scheme: str) -> bool:
    if scheme == "BASE":
        return False
    body = schemes.parse(scheme.partition(",")[0])
    return (body.weight_bits, body.weight_type, body.gguf) == (4, "int", "")


def _beside(row: Row, control: Mapping[str, float | None]) -> str:
    """How a 4-bit method's perplexity stands to rounding's at the same scheme."""
    rounded = control.get(row.scheme)
    if row.ratio is None or row.quantizer == CONTROL or rounded is None:
        return ""
    return f"{row.ratio / rounded:.3f} {'ahead' if row.ratio < rounded else 'NOT AHEAD'}"


def _print(rows: Iterable[Row], control: Mapping[str, float | None]) -> None:
    print(
        f"{'variant':<32} {'scheme':<26} {'library':<24} {'s':>7} {'peak MiB':>8} {'bits':>6} {'ppl/base':>8} "
        f"{'over RTN':>15} reload"
    )
    for row in sorted(rows, key=lambda r: (bool(r.why), r.scheme, r.ratio or 0.0)):
        if row.why:
            print(f"{row.variant:<32} {row.scheme:<26} {row.why}")
            continue
        print(
            f"{row.variant:<32} {row.scheme:<26} {row.library:<24} {row.seconds:>7.1f} {row.rss_bytes / 2**20:>8.0f} "
            f"{row.bits:>6.2f} {row.ratio:>8.4f} {_beside(row, control):>15} ok"
        )


def _figures(row: Row) -> dict[str, object]:
    if row.why:
        return {"quantizer": row.quantizer, "scheme": row.scheme, "why": row.why}
    return {
        "quantizer": row.quantizer, "scheme": row.scheme, "library": row.library, "toolchain": row.toolchain,
        "seconds": round(row.seconds, 1), "peak_rss_mib": row.rss_bytes // 2**20, "bits_per_linear_weight": row.bits,
        "perplexity_ratio": None if row.ratio is None else round(row.ratio, 5),
    }  # fmt: skip


def _shown(campaign: Campaign) -> dict[str, object]:
    held_out, shown = campaign.config.held_out, campaign.config.calibration
    return {
        "base": campaign.config.checkpoint.source,
        "calibration": f"{shown.samples} x {shown.max_tokens} tokens",
        "held_out": f"{held_out.windows} x {held_out.length} tokens",
    }


if __name__ == "__main__":
    main()
