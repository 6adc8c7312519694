"""Whether an engine may be released: the licence of its base is known, allowed, and told alike by all who tell it."""

from __future__ import annotations

from pathlib import Path

from pipelines.decide import licences
from pipelines.decide.model import Candidate, Decision
from pipelines.errors import EvidenceError, LicenceUnknown
from pipelines.flow.store import manifest
from pipelines.intake import spdx
from pipelines.intake.licence import UNKNOWN


def check(decision: Decision, candidate: Candidate, engine: Path) -> str:
    """Give the licence that an engine is released under.

    An engine made before licences were handed on says nothing, and then the decision's word is enough.

    Raises:
        LicenceUnknown: the decision does not know it; never overridden.
        EvidenceError: the gate does not allow it, or the engine says another; a person may override these, by name.
    """
    refused, licence = licences.refusal(decision.base, _allowed(decision)), licences.of(decision.base)
    if not licence:
        raise LicenceUnknown(f"{candidate.label}: {refused}; then decide again")
    if refused:
        raise EvidenceError(f"{candidate.label}: {refused}")
    if told := _disagreement(decision, licence, engine):
        raise EvidenceError(f"{candidate.label}: {told}")
    return licence


def _allowed(decision: Decision) -> tuple[str, ...] | None:
    """The gate's list as the decision kept it."""
    constraints = decision.gate.get("constraints")
    listed = constraints.get("licences") if isinstance(constraints, dict) else None
    return None if listed is None else tuple(str(name) for name in listed)


def _disagreement(decision: Decision, licence: str, engine: Path) -> str:
    """What was found in the base when the engine was made, where it is not what the decision found; "" otherwise.

    A statement, then or now, is a person's and no finding.
    """
    facts = manifest(engine).facts
    then, source = str(facts.get("licence") or UNKNOWN), facts.get("licence_source")
    if source == "stated" or decision.base.get("licence source") == "stated":
        return ""
    if then == UNKNOWN or spdx.same(then, licence):
        return ""
    return (
        f"the decision has the base under {licence} ({licences.said(decision.base)}), when its engine was made it was "
        f"under {then}; {licences.STATE_IT}, and decide again"
    )
