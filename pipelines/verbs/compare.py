"""`quantgate compare A B [C ...]`: figures side by side with intervals, what differs, and what is not comparable."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from pipelines import terminal
from pipelines.campaign import CampaignConfig
from pipelines.cli import UI_PORT, Answer
from pipelines.compose import compose
from pipelines.config import parse
from pipelines.decide.compared import Compared, Comparison
from pipelines.errors import InputError
from pipelines.flow.store import Store
from pipelines.release import comparison as comparisons
from pipelines.release.subjects import Known
from pipelines.track import comparepage, contrasts
from pipelines.track.connection import absolute_uri, is_server
from pipelines.track.masking import masked_text
from pipelines.track.standing import recorded

REFUSED = 7


def compare(args: argparse.Namespace) -> Answer:
    """Compare what was named with the first of them; an argument with `=` is an override."""
    names = [word for word in args.things if "=" not in word]
    if len(names) < 2:
        raise InputError("compare takes two names or more: the base, then what is compared with it")
    directory = Path(args.config_dir).resolve() if args.config_dir else None
    config = parse(CampaignConfig, compose([word for word in args.things if "=" in word], directory))
    uri = absolute_uri(config.tracking.uri)
    known = Known(
        store=Store(Path(config.paths.store).resolve()), campaign=config.campaign, tracking_uri=uri,
        model=config.tracking.registered_model, ledger=Path(config.paths.ledger).resolve(),
    )  # fmt: skip
    compared, shown = comparisons.compare(known, names, confidence=args.confidence, anyway=args.anyway)
    links = {n: link for n, one in enumerate(compared.comparisons) if (link := _link(one, uri))}
    _show(compared, links)
    if args.html:
        made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        comparepage.write(Path(args.html), comparepage.page(compared, shown, made=made, links=links))
        terminal.console().print(f"page:     {args.html}", markup=False)
    document = compared.model_dump(mode="json") | {"links": list(links.values()), "html": args.html or ""}
    return Answer(REFUSED if compared.refused else 0, document)


def _link(one: Comparison, uri: str) -> str:
    """MLflow's own page about these runs, where all of them still stand."""
    if not one.mlflow or not all(recorded(uri, side.run_id) for side in one.sides):
        return ""
    return masked_text(f"{uri.rstrip('/') if is_server(uri) else f'http://127.0.0.1:{UI_PORT}'}/{one.mlflow}")


def _show(compared: Compared, links: dict[int, str]) -> None:
    say = terminal.console()
    for n, one in enumerate(compared.comparisons):
        for side in one.sides[1:]:
            _table(one, side.name, compared.confidence)
        _differing(one)
        for refusal in one.refusals:
            say.print(f"refused: {contrasts.refused(refusal)}", markup=False)
        if n in links:
            served = " (`quantgate ui` serves it)" if links[n].startswith("http://127.0.0.1") else ""
            say.print(f"MLflow:   {links[n]}{served}", markup=False)
    for label, why in compared.unmatched.items():
        say.print(f"not compared: {label}: {why}", markup=False)
    askable = [r for r in compared.refused if not r.missing]
    if askable and not compared.anyway:
        say.print(f"{len(askable)} refused, since conditions differ; --anyway compares and marks them", markup=False)


def _table(one: Comparison, side: str, confidence: float) -> None:
    """One side against the base; why a figure is marked stands below, under the number in its row."""
    rows, marks = [], list(dict.fromkeys(d.marks for d in contrasts.brief(one, side) if d.marks))
    for d in contrasts.brief(one, side):
        reads = ("the same" if d.exact else "") if d.reading == "no difference shown" else d.reading
        marked = f"[{marks.index(d.marks) + 1}] {d.note}" if d.marks else d.note
        shown = (contrasts.value(d.base, d.unit), contrasts.value(d.other, d.unit))
        rows.append((contrasts.figure(d), *shown, contrasts.change(d), reads, contrasts.count(d), marked))
    head = ("figure", one.base.name, side, f"change, {confidence:.0%} interval", "reads", "over", "note")
    terminal.table(f"{side} against {one.base.name}", head, rows)
    for n, reasons in enumerate(marks, start=1):
        terminal.console().print(f"[{n}] not like with like: {'; '.join(reasons)}", markup=False)


def _differing(one: Comparison) -> None:
    rows = [(c.section, c.key, *map(contrasts.shortened, c.values)) for c in one.changes if c.section != "date"]
    terminal.table("What differs", ("in", "key", *(side.name for side in one.sides)), rows)
    dates = sum(c.section == "date" for c in one.changes)
    same = ", ".join(f"{section} {count}" for section, count in one.same.items() if count)
    print(f"the same: {same}" + (f"; {dates} dates differ (--json and the page list them)" if dates else ""))
