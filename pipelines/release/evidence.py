"""What a promotion rests on: proved to be there and unchanged, and linked by reference so that it can be proved again.

Hashing is the slow part, so it is done before the ledger's lock is taken; under the lock `Seen` says whether a file was
touched since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.decide.model import Candidate, Decision
from pipelines.errors import EvidenceError
from pipelines.flow.store import MANIFEST, Manifest, Store, manifest, sha256_of, verify
from pipelines.release.ledger import Evidence

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

DECISION = "decision.json"
LARGE_BYTES = 2**30
Tell = Callable[[str], None]
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """An engine's files as they were before they were hashed: size, time of change and inode of each."""

    engine: Path
    stamps: Mapping[str, Stamp]

    def check(self) -> None:
        """Raise where a file was touched since.

        Raises:
            EvidenceError: it was; the first one is named.
        """
        now = _stamps(self.engine)
        touched = sorted(n for n in self.stamps.keys() | now.keys() if self.stamps.get(n) != now.get(n))
        if touched:
            raise EvidenceError(f"{self.engine}: {touched[0]} was touched while it was being verified; try again")


def check_files(engine: Path, tell: Tell | None = None) -> Seen:
    """Prove that an engine is, byte for byte, what was measured.

    Raises:
        EvidenceError: the engine is gone, or files differ from its manifest; they are named.
    """
    size = sum(count for _, count in manifest(engine).files.values())
    if tell is not None and size >= LARGE_BYTES:
        tell(f"hashing {size / 2**30:.1f} GiB of {engine}")
    seen = Seen(engine, _stamps(engine))
    _same(engine, "the engine that was measured")
    return seen


def check_judged(decision: Path, candidate: Candidate, store: Store) -> None:
    """Prove that the decision is the one that was made, and that the figures it rests on are there, unchanged.

    The variant that the engine was built from has to be there, but is not hashed: it is not what is released.

    Raises:
        EvidenceError: something is gone or differs from its manifest; it is named.
    """
    _same(decision, "the decision that was made")
    if not any(name.startswith("scores/") for name in candidate.keys):
        raise EvidenceError(f"{candidate.label}: was never scored, so nothing shows what it can do")
    for name, key in sorted(candidate.keys.items()):
        path = store.path(name.partition("/")[0], key)
        if not (path / MANIFEST).is_file():
            raise EvidenceError(
                f"{candidate.label}: {name} {key[:16]} is gone from {store.root}; run the campaign again"
            )
        if name != "variant" and not name.startswith("engine"):
            _same(path, f"what {candidate.label} was judged by")


def recorded(tags: Mapping[str, str]) -> Evidence | None:
    """What a version's tags say that it rests on; None where it was registered before they said that."""
    wanted = ("candidate", "outcome", "engine_uri", "manifest_sha256", "decision_uri", "decision_sha256")
    if any(name not in tags for name in wanted):
        return None
    return Evidence(**{name: tags[name] for name in Evidence.model_fields if name in tags})


def gathered(made: Decision, decision: Path, chosen: Candidate, engine: Path, store: Store) -> Evidence:
    """Link a candidate's evidence by reference; nothing of it is copied."""
    return Evidence(
        candidate=chosen.label,
        outcome=made.outcome if chosen.label == made.winner else chosen.outcome or "reference",
        engine_uri=engine.resolve().as_uri(),
        manifest_sha256=sha256_of(engine / MANIFEST),
        decision_uri=decision.resolve().as_uri(),
        decision_sha256=sha256_of(decision / DECISION),
        report_uri=_report(decision, store),
    )


def runs(client: MlflowClient, version: ModelVersion, decision: str, label: str) -> tuple[str, str]:
    """The candidate's run in MLflow and the campaign's, "" each where the campaign was not recorded."""
    from mlflow.exceptions import MlflowException

    if version.run_id:
        try:
            found = [client.get_run(version.run_id)]
        except MlflowException:  # somebody deleted it for good
            found = []
    else:
        experiments = [e.experiment_id for e in client.search_experiments()]
        of_decision = client.search_runs(experiments, f"tags.campaign_key = '{decision}'", max_results=1000)
        found = [r for r in of_decision if r.data.tags.get("candidate") == label]
    if not found:
        return "", ""
    return str(found[0].info.run_id), str(found[0].data.tags.get("mlflow.parentRunId", ""))


def _report(decision: Path, store: Store) -> str:
    """The newest report of a decision, "" where there is none."""
    key = manifest(decision).key
    found: list[tuple[str, Path]] = []
    for path in (store.root / "report").glob(f"*/{MANIFEST}"):
        made = manifest(path.parent)
        if _made_of(made, key):
            found.append((made.started, path.parent / "report.html"))
    return max(found)[1].resolve().as_uri() if found else ""


def _made_of(made: Manifest, key: str) -> bool:
    return any(key in (given if isinstance(given, list) else [given]) for given in made.inputs.values())


def _same(artifact: Path, what: str) -> None:
    differing = verify(artifact)
    if differing:
        listed = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        raise EvidenceError(f"{artifact}: not {what}; these files differ from its manifest: {listed}")


def _stamps(engine: Path) -> dict[str, Stamp]:
    files = (path for path in engine.rglob("*") if path.is_file())
    found = ((path.relative_to(engine).as_posix(), path.stat()) for path in files)
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found}
