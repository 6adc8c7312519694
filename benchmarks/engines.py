"""Engines for benchmarks: the campaign's own steps, made or reused in the campaign's own store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.assembly import assemble
from pipelines.campaign import open_campaign
from pipelines.compose import compose
from pipelines.conduct import environment
from pipelines.flow.executor import execute
from pipelines.flow.plan import plan
from pipelines.flow.store import Fact, Store, facts
from pipelines.terminal import Watcher


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, the checkpoint it was built from, and what its build found out."""

    checkpoint: Path
    engine: Path
    facts: dict[str, Fact]


def build(overrides: Sequence[str]) -> tuple[dict[str, Built], int]:
    """Make the engines of a campaign by label, and say how many threads it runs with."""
    campaign = open_campaign(compose(overrides))
    store = Store(Path(campaign.config.paths.store).resolve())
    store.prepare()
    candidates = assemble(campaign, {}, {}).candidates
    wanted = plan([c.built for c in candidates], store)
    with Watcher(len(wanted.to_run), wanted.seconds) as watch:
        outcomes = execute(wanted, store, watch, environment(campaign))
    failed = [o for o in outcomes.values() if o.state == "failed"]
    if failed:
        raise SystemExit(f"{failed[0].step.label}: {failed[0].message}\n{failed[0].command}")
    paths = {c.label: (store.path("variant", c.quantized.key), store.path("engine", c.built.key)) for c in candidates}
    return {label: Built(v, e, facts(e)) for label, (v, e) in paths.items()}, campaign.threads
