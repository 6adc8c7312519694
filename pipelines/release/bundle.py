"""What one deploys: an engine with its serve command, its evidence and its base's licence, in one directory or archive.

Only an engine that was promoted, and that has answered on the device it is for. The same engine by the same decision
gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipelines import __version__
from pipelines.config import Strict
from pipelines.decide.model import Candidate, Decision
from pipelines.engine.card import read_card
from pipelines.engine.table import target
from pipelines.errors import ConfigError, EvidenceError, Problem, closest
from pipelines.flow.store import MANIFEST, Manifest, Store, manifest, sha256_of
from pipelines.flow.toolchain import Toolchain
from pipelines.intake import licence
from pipelines.release import deploy
from pipelines.release.evidence import check_files
from pipelines.release.ledger import Entry, Ledger

SUMS, CARD = "SHA256SUMS", "bundle.json"
EXECUTABLE = frozenset({deploy.SERVE, deploy.IN_CONTAINER})


class BundleCard(Strict):
    """`bundle.json`: what is in a bundle and why it may be deployed, or that nothing says so."""

    version: Literal[1] = 1
    name: str
    campaign: str
    candidate: str
    promoted: bool
    promotion: Entry | None
    outcome: str
    target: str
    model_id: str
    scheme: str
    native: bool
    native_note: str
    keys: dict[str, str]
    toolchain: dict[str, str]
    device: dict[str, str] | None
    base: dict[str, str]
    licence_files: tuple[str, ...]
    made_by: str


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine with the decision about it, and the promotion that made it champion, where there was one."""

    decision: Path
    made: Decision
    candidate: Candidate
    engine: Path
    promotion: Entry | None


def promoted(ledger: Ledger, model: str, store: Store) -> Subject:
    """The engine that the ledger last made champion.

    Raises:
        EvidenceError: nothing was promoted, or the decision or the engine is gone.
    """
    entry = ledger.committed(model)
    if entry is None:
        raise EvidenceError(
            f"{model}: nothing was promoted yet (`quantgate promote`); --unpromoted bundles what a decision names"
        )
    decision = store.path("decision", entry.change.decision_key)
    made = _read(decision)
    chosen = [c for c in made.candidates if c.keys.get("engine", "")[:16] == entry.change.engine_key[:16]]
    if not chosen:
        raise EvidenceError(f"{decision}: is not about engine {entry.change.engine_key}, which was promoted by it")
    return Subject(decision, made, chosen[0], store.path("engine", entry.change.engine_key), entry)


def named(decision: Path, store: Store, label: str | None) -> Subject:
    """A candidate of a decision, its winner where none is named; nothing says that it may be deployed.

    Raises:
        ConfigError: there is no such candidate, or no winner.
        EvidenceError: it has no engine.
    """
    made = _read(decision)
    known = {c.label: c for c in made.candidates}
    wanted = label or made.winner
    if wanted is None or wanted not in known:
        raise ConfigError([Problem("candidate", wanted, "not in the decision", closest(wanted or "", known))])
    engine = known[wanted].keys.get("engine")
    if known[wanted].status == "failed" or engine is None:
        raise EvidenceError(f"{wanted}: there is no engine to bundle: {known[wanted].failure or 'none was built'}")
    return Subject(decision, made, known[wanted], store.path("engine", engine), None)


def bundle(subject: Subject, store: Store, toolchains: Mapping[str, Toolchain], out: Path) -> BundleCard:
    """Write the bundle: a directory, or a .tar where `out` says so. It appears whole or not at all.

    Raises:
        ConfigError: something stands there already.
        EvidenceError: the engine is simulated, was changed, or never answered on its device.
    """
    if out.exists():
        raise ConfigError([Problem("out", str(out), "something stands there already; name another place")])
    check_files(subject.engine)
    about = manifest(subject.engine)
    check_ran(subject, about, store)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / "bundle"
        card = _fill(made, subject, about, store, toolchains)
        if out.suffix == ".tar":
            _archive(made, Path(scratch) / out.name, out.stem)
            (Path(scratch) / out.name).rename(out)
        else:
            made.rename(out)
    return card


def check_ran(subject: Subject, about: Manifest, store: Store) -> None:
    """Prove that an engine was loaded and answered where it is to run.

    Raises:
        EvidenceError: it did not, or a stand-in did in its place.
    """
    label, one = subject.candidate.label, subject.candidate
    if about.simulated or about.facts.get("simulated") is True or one.simulated:
        raise EvidenceError(f"{label}: made by a simulated container, so it is no engine; it is never bundled")
    if one.unjudged:
        raise EvidenceError(f"{label}: was built, not judged, so it is never bundled: {one.unjudged}")
    if about.facts.get("deserialized") is False or about.facts.get("smoke_answers") == 0:
        raise EvidenceError(f"{label}: was never loaded and asked on its device when it was built")
    scored = [store.path("scores", key) for name, key in one.keys.items() if name.startswith("scores/")]
    if not scored:
        raise EvidenceError(f"{label}: was never scored, so nothing shows that it answers")
    if lost := [path for path in scored if not (path / MANIFEST).is_file()]:
        raise EvidenceError(f"{label}: the scores that show that it answered are gone: {lost[0]}")
    if about.device is not None:
        _check_device(label, about.device, one, store)


def _check_device(label: str, device: Mapping[str, str], one: Candidate, store: Store) -> None:
    """An engine that belongs to a device was probed on one like it."""
    key = one.keys.get("latency")
    probed = manifest(store.path("latency", key)).device if key else None
    if probed is None:
        raise EvidenceError(f"{label}: belongs to the device it was built on, and was never probed there")
    unlike = [name for name in ("gpu", "gpu_sm") if device.get(name) != probed.get(name)]
    if unlike:
        name = unlike[0]
        raise EvidenceError(f"{label}: built for {name} {device.get(name)!r}, probed on {probed.get(name)!r}")


def _fill(
    made: Path, subject: Subject, about: Manifest, store: Store, toolchains: Mapping[str, Toolchain]
) -> BundleCard:
    made.mkdir()
    shutil.copytree(subject.engine, made / deploy.ENGINE, copy_function=shutil.copyfile)
    licences = _licences(made, subject, store)
    _evidence(made, subject, store)
    card = _card(subject, about, licences)
    served = deploy.served(target(card.target), subject.engine, about, toolchains)
    texts = deploy.texts(card, served) | target(card.target).deployment(
        subject.engine, f"{deploy.MOUNTED}/{deploy.ENGINE}"
    )
    texts[CARD] = card.model_dump_json(indent=2) + "\n"
    for name, text in texts.items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    _sum(made)
    for path in made.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.relative_to(made).as_posix() in EXECUTABLE else 0o644)
    made.chmod(0o755)
    return card


def _card(subject: Subject, about: Manifest, licences: tuple[str, ...]) -> BundleCard:
    one, engine = subject.candidate, read_card(subject.engine)
    return BundleCard(
        name=f"{subject.made.campaign}-{one.label}-{subject.engine.name}",
        campaign=subject.made.campaign,
        candidate=one.label,
        promoted=subject.promotion is not None,
        promotion=subject.promotion,
        outcome=one.outcome or "reference",
        target=engine.target,
        model_id=engine.model_id,
        scheme=one.scheme,
        native=engine.native,
        native_note=engine.native_note,
        keys={**one.keys, "decision": subject.decision.name},
        toolchain=about.toolchain,
        device=about.device,
        base=subject.made.base,
        licence_files=licences,
        made_by=f"quantgate {__version__}",
    )


def _licences(made: Path, subject: Subject, store: Store) -> tuple[str, ...]:
    """Copy the base's licence and use-policy files, which every variant carries, and write down who says what."""
    variant = store.path("variant", subject.candidate.keys["variant"])
    if not variant.is_dir():
        raise EvidenceError(f"{variant}: the variant is gone, and with it the base's licence files; make it again")
    found = sorted(p for p in variant.iterdir() if p.is_file() and licence.FILES.fullmatch(p.name))
    room = made / deploy.LICENCE
    room.mkdir()
    for path in found:
        shutil.copyfile(path, room / path.name)
    names = tuple(p.name for p in found)
    (room / deploy.ORIGIN).write_text(deploy.origin(subject.made.base, names), encoding="utf-8")
    return names


def _evidence(made: Path, subject: Subject, store: Store) -> None:
    """Copy the decision, and the manifests of everything that it rests on for this candidate."""
    room = made / deploy.EVIDENCE
    room.mkdir()
    for name in ("decision.json", "decision.md"):
        shutil.copyfile(subject.decision / name, room / name)
    shutil.copyfile(subject.decision / MANIFEST, room / "decision.manifest.json")
    for name, key in sorted(subject.candidate.keys.items()):
        kind, _, part = name.partition("/")
        source = store.path(kind, key) / MANIFEST
        if source.is_file():
            shutil.copyfile(source, room / f"{kind}{'-' if part else ''}{part}.manifest.json")
    if subject.promotion is not None:
        text = json.dumps(subject.promotion.model_dump(mode="json"), indent=2)
        (room / "promotion.json").write_text(text + "\n")


def _sum(made: Path) -> None:
    """Write SHA256SUMS as `sha256sum -c` reads it."""
    files = sorted(p for p in made.rglob("*") if p.is_file())
    lines = [f"{sha256_of(p)}  {p.relative_to(made).as_posix()}\n" for p in files]
    (made / SUMS).write_text("".join(lines))


def _archive(made: Path, out: Path, root: str) -> None:
    """Pack a directory so that equal contents are equal bytes: sorted, and of nobody and no time."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        return info

    with tarfile.open(out, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(made, root, recursive=False, filter=plain)
        for path in sorted(made.rglob("*")):
            tar.add(path, f"{root}/{path.relative_to(made).as_posix()}", recursive=False, filter=plain)


def _read(decision: Path) -> Decision:
    path = decision / "decision.json"
    try:
        return Decision.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path}: no readable decision ({error}); run `quantgate verify`") from None
