"""The texts of a bundle: how to serve it from a shell, in a container, and in Kubernetes; and a README. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.decide import licences
from pipelines.engine.table import Target
from pipelines.flow.containers import reference
from pipelines.flow.store import Manifest
from pipelines.flow.toolchain import CURRENT, ContainerConfig, Toolchain
from pipelines.intake.spdx import REF

if TYPE_CHECKING:
    from pipelines.release.bundle import BundleCard

ENGINE, EVIDENCE, LICENCE, ORIGIN = "engine", "evidence", "licence", "ORIGIN.md"
SERVE, IN_CONTAINER, KUBERNETES, PACKAGES = "serve.sh", "serve-in-container.sh", "kubernetes.yaml", "requirements.txt"
MOUNTED = "/bundle"
"""Where a bundle is mounted in containers."""
_HOST, _PORT, _THREADS = "127.0.0.1", 59871, 397  # stand-ins that no command has by chance
_PLACEHOLDER = "REGISTRY/IMAGE@sha256:DIGEST"
_NO_PACKAGE = ("python", "toolchain", "image")


@dataclass(frozen=True, slots=True)
class Served:
    """How an engine is served: the command's words for a shell, and what it needs around it."""

    words: tuple[str, ...]
    env: Mapping[str, str]
    container: ContainerConfig | None
    packages: Mapping[str, str]
    gpus: int
    gpu_name: str


def served(row: Target, engine: Path, about: Manifest, toolchains: Mapping[str, Toolchain]) -> Served:
    """Ask the target for its command, and put the bundle's own places and settings where ours stand in it."""
    argv, env = row.serve(engine, _PORT, _THREADS)
    spec = toolchains.get(about.toolchain.get("toolchain", CURRENT.name), CURRENT).spec
    container = spec if isinstance(spec, ContainerConfig) and spec.digest == about.toolchain.get("image") else None
    ranks = int(about.facts.get("tp") or 1) * int(about.facts.get("pp") or 1)
    gpu = str(about.facts.get("gpu_name") or "")
    return Served(
        words=tuple(_word(word, engine) for word in argv),
        env={name: _word(value, engine) for name, value in env.items()},
        container=container,
        packages={name: version for name, version in about.toolchain.items() if name not in _NO_PACKAGE},
        gpus=ranks if gpu else 0,
        gpu_name=gpu,
    )


def _word(word: str, engine: Path) -> str:
    """One word for a shell."""
    whole = {_HOST: "$SERVE_HOST", str(_PORT): "$SERVE_PORT", str(_THREADS): "$SERVE_THREADS"}
    if word == sys.executable:
        return '"$PYTHON"'
    if word in whole:
        return f'"{whole[word]}"'
    before, found, after = word.partition(str(engine))
    if not found:
        return shlex.quote(word)
    quoted = f'"$here/{ENGINE}"' + (shlex.quote(after) if after else "")
    return (shlex.quote(before) if before else "") + quoted


def texts(card: BundleCard, how: Served) -> dict[str, str]:
    """Every text of a bundle by its path."""
    found = {"README.md": _readme(card, how), SERVE: _serve(card, how), KUBERNETES: _kubernetes(card, how)}
    if how.container is not None:
        found[IN_CONTAINER] = _in_container(card, how.container)
    else:
        pins = "".join(f"{name}=={version}\n" for name, version in sorted(how.packages.items()))
        found[PACKAGES] = f"# What the engine was made and measured with; its server is part of {card.made_by}.\n{pins}"
    return found


def _warning(card: BundleCard) -> str:
    return "" if card.promoted else f"NOT PROMOTED: its decision is {card.outcome}, and nobody released it"


def _serve(card: BundleCard, how: Served) -> str:
    warning = _warning(card)
    exports = "".join(f"export {name}={value}\n" for name, value in how.env.items())
    return (
        "#!/bin/sh\n"
        f"# Serves {card.model_id} ({card.target}) with an OpenAI-compatible protocol.\n"
        + (f"# {warning}\n" if warning else "")
        + "# SERVE_HOST, SERVE_PORT, SERVE_THREADS and PYTHON may be set from outside.\n"
        "set -eu\n"
        'here=$(CDPATH="" cd -- "$(dirname -- "$0")" && pwd)\n'
        "SERVE_HOST=${SERVE_HOST:-127.0.0.1}\n"
        "SERVE_PORT=${SERVE_PORT:-8000}\n"
        "SERVE_THREADS=${SERVE_THREADS:-$(getconf _NPROCESSORS_ONLN)}\n"
        "PYTHON=${PYTHON:-python3}\n"
        + (f'echo "{warning}" >&2\n' if warning else "")
        + exports
        + f"exec {' '.join(how.words)}\n"
    )


def _in_container(card: BundleCard, spec: ContainerConfig) -> str:
    gpus = [] if spec.gpus is None else ["--gpus", spec.gpus if spec.gpus == "all" else f'"device={spec.gpus}"']
    limits = [word for limit in spec.ulimits for word in ("--ulimit", limit)]
    env = [word for name, value in spec.env.items() for word in ("--env", f"{name}={value}")]
    options = shlex.join(["--ipc", spec.ipc, *limits, *gpus, *env, *spec.options])
    return (
        "#!/bin/sh\n"
        f"# Serves {card.model_id} in the image it was made and measured in, on this machine's network.\n"
        "set -eu\n"
        'here=$(CDPATH="" cd -- "$(dirname -- "$0")" && pwd)\n'
        f"exec {spec.runtime} run --rm --init --network host {options} \\\n"
        f'  --mount "type=bind,src=$here,dst={MOUNTED},readonly" \\\n'
        '  --env "SERVE_HOST=${SERVE_HOST:-127.0.0.1}" --env "SERVE_PORT=${SERVE_PORT:-8000}" \\\n'
        f"  --entrypoint {MOUNTED}/{SERVE} {shlex.quote(reference(spec))}\n"
    )


def _kubernetes(card: BundleCard, how: Served) -> str:
    """A Deployment and its Service, to be adapted: the image where there is none, the claim that holds the bundle."""
    import yaml

    image = reference(how.container) if how.container is not None else _PLACEHOLDER
    name = "".join(c if c.isalnum() else "-" for c in card.name.lower()).strip("-")[:50].strip("-")
    labels = {"app": name}
    container: dict[str, Any] = {
        "name": "server",
        "image": image,
        "command": [f"{MOUNTED}/{SERVE}"],
        "env": [{"name": "SERVE_HOST", "value": "0.0.0.0"}, {"name": "SERVE_PORT", "value": "8000"}],
        "ports": [{"containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 5, "failureThreshold": 360},
        "volumeMounts": [{"name": "bundle", "mountPath": MOUNTED, "readOnly": True}],
    }
    if how.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": how.gpus}}
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": [{"name": "bundle", "persistentVolumeClaim": {"claimName": name, "readOnly": True}}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    head = f"# An example. The claim {name} holds this bundle.\n"
    head += f"# {_warning(card)}\n" if _warning(card) else ""
    head += f"# Give an image with {card.made_by} and {PACKAGES}.\n" if how.container is None else ""
    head += f"# Built and measured on {how.gpu_name}; schedule it on nothing else.\n" if how.gpus else ""
    return head + str(yaml.safe_dump_all([deployment, service], sort_keys=False))


def _readme(card: BundleCard, how: Served) -> str:
    warning = _warning(card)
    needs = (
        f"./{IN_CONTAINER}        # in the image it was made in\n    ./{SERVE}                     # inside that image"
        if how.container is not None
        else f"pip install -r {PACKAGES}   # besides {card.made_by} itself\n    PYTHON=python3 ./{SERVE}"
    )
    native = (
        "" if card.native else f"\nThis engine emulates its format: {card.native_note}. Its latency is no evidence.\n"
    )
    return f"""# {card.model_id}
{f"{chr(10)}**{warning}.**{chr(10)}" if warning else ""}
{card.candidate} of campaign {card.campaign}: {card.scheme} in {card.target}, from {card.base.get("source", "?")}.
The decision and all it rests on: `{EVIDENCE}/decision.md`. What this is, for machines: `bundle.json`.
{native}
## Check

    sha256sum -c SHA256SUMS

## Serve

    {needs}

It answers `/v1/models`, `/v1/completions` and `/v1/chat/completions` on http://127.0.0.1:8000 once `/health` does; set
`SERVE_HOST`, `SERVE_PORT` and `SERVE_THREADS` for others. `{KUBERNETES}` is an example of a deployment.

## Licence

{_licensed(card.base, card.licence_files)} More: `{LICENCE}/{ORIGIN}`.
"""


def _licensed(base: Mapping[str, str], files: Sequence[str]) -> str:
    """What the base is under, and where its text is."""
    under = licences.of(base)
    if not under:
        return "**The licence of the base is unknown: pass this on to nobody before it is known.**"
    texts = ", ".join(f"`{LICENCE}/{name}`" for name in files)
    said = f"Its files: {texts}." if texts else "The base came without a licence text, so there is none here."
    return f"The base is under {under} ({licences.said(base)}). {said}"


def origin(base: Mapping[str, str], files: Sequence[str]) -> str:
    """What is known of the licence, from where, and where its text may be read if it did not come with the base."""
    under, link = licences.of(base), base.get("licence link", "")
    known = {
        "licence": under or "unknown",
        "said by": licences.said(base) if under else base.get("licence note", "") or "nothing",
        "overruled": base.get("licence note", "") if under else "",
        "link": link,
        "base": " at ".join(filter(None, (base.get("source", ""), base.get("revision", "")))),
        "files in the base": base.get("licence files", ""),
    }
    lines = [f"- {name}: {text}" for name, text in known.items() if text]
    if under and not files:
        public = [f"https://spdx.org/licenses/{n}.html" for n in licences.names(under) if not n.startswith(REF)]
        where = ", ".join(public or ([link] if link else [])) or "at the base's source"
        lines += [
            "", f"The base came without the text of its licence. It is published: {where}.",
            "Add it before you pass on what is here, if the licence asks for that (Apache-2.0 and MIT do).",
        ]  # fmt: skip
    return "# Licence of the base checkpoint\n\n" + "\n".join(lines) + "\n"
