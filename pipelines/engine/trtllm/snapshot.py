"""Make a release's flag snapshot from its own `--help` and schemas, and print what differs from a known one.

    python -m pipelines.engine.trtllm.snapshot --release 1.2.1 --out flags.json \\
        --prefix "docker run --rm --gpus all nvcr.io/nvidia/tensorrt-llm/release@sha256:..."

The tools want a GPU even for --help of some versions. Texts captured elsewhere are read with --captured DIR: a file
<command>.txt for each command, <schema>.json for each schema. Exit code 1 says that something differs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.engine.trtllm import flags, helptext
from pipelines.engine.trtllm.flags import Command, Node, Option, Snapshot
from pipelines.engine.trtllm.rules import LAST_WITH_BUILDER, order
from pipelines.errors import EnvironmentProblem, InputError, QuantgateError

CONVERTER = "convert_checkpoint.py"
COMMANDS: Mapping[str, Sequence[str]] = {
    "trtllm-build": ("trtllm-build", "--help"),
    CONVERTER: ("python3", "/app/tensorrt_llm/examples/models/core/llama/convert_checkpoint.py", "--help"),
    "trtllm-serve": ("trtllm-serve", "serve", "--help"),
}
CLICK = frozenset({"trtllm-serve"})
SCHEMAS: Mapping[str, str] = {
    name: f"import json; from tensorrt_llm.llmapi.llm_args import {name} as A; print(json.dumps(A.model_json_schema()))"
    for name in ("TorchLlmArgs", "TrtLlmArgs")
}
GONE = frozenset({"trtllm-build", CONVERTER, "TrtLlmArgs"})
"""What releases after the last with a builder need not have; their snapshots are made without."""
TIMEOUT_S = 600


def ask(argv: Sequence[str]) -> str:
    """What a command says.

    Raises:
        EnvironmentProblem: it cannot be run, or fails.
    """
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"{argv[0]}: cannot be run ({error})") from None
    if done.returncode:
        raise EnvironmentProblem(f"{shlex.join(argv)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def captured(release: str, directory: Path, prefix: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The text of each command's help and of each schema: from a directory's files, else by running them."""
    asked = {name: ("txt", argv) for name, argv in COMMANDS.items()}
    asked |= {name: ("json", ("python3", "-c", code)) for name, code in SCHEMAS.items()}
    for name, (suffix, argv) in asked.items():
        file = directory / f"{name}.{suffix}"
        if file.is_file():
            yield name, file.read_text()
        elif prefix and not (name in GONE and order(release) > order(LAST_WITH_BUILDER)):
            yield name, ask([*prefix, *argv])


def snapshot_of(release: str, texts: Mapping[str, str], known: Snapshot | None) -> Snapshot:
    """Read captured texts into a snapshot. Types that help does not tell are taken from the known one.

    Raises:
        InputError: a text is not what it should be.
    """
    commands, schemas = {}, {}
    for name, text in texts.items():
        if name in COMMANDS:
            read = helptext.of_click(text) if name in CLICK else helptext.of_argparse(text)
            if not read.options:
                raise InputError(f"{name}: no options are told in its help")
            commands[name] = _with_known_types(read, known.commands.get(name) if known else None)
        else:
            schemas[name] = helptext.of_schema(_schema(name, text))
    about = f"Read from --help and JSON schemas of TensorRT-LLM {release} by pipelines.engine.trtllm.snapshot."
    sources = dict.fromkeys(texts, "captured")
    return Snapshot(release=release, about=about, sources=sources, commands=commands, schemas=schemas)


def _schema(name: str, text: str) -> dict[str, Any]:
    """The last line that is JSON; libraries print before it."""
    for line in reversed(text.strip().splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise InputError(f"{name}: no JSON schema was printed")


def _with_known_types(read: Command, known: Command | None) -> Command:
    """Options whose type is only a guess (text without a default) get that of the known snapshot."""
    if known is None:
        return read
    options = {}
    for name, option in read.options.items():
        before = known.named(name)
        guessed = option.type == "str" and option.default is None and not option.choices
        if before is not None and guessed and before.type != "flag":
            option = option.model_copy(update={"type": before.type, "choices": before.choices})
        options[name] = option
    return read.model_copy(update={"options": options})


def differences(old: Snapshot, new: Snapshot) -> list[str]:
    """What a newer snapshot has more, less or otherwise, a line each."""
    found: list[str] = []
    for name in sorted(old.commands.keys() & new.commands.keys()):
        found += _command_differences(name, old.commands[name], new.commands[name])
    found += [f"- {name}: is gone" for name in sorted(old.commands.keys() - new.commands.keys())]
    for name in sorted(old.schemas.keys() & new.schemas.keys()):
        found += _node_differences(name, old.schemas[name], new.schemas[name])
    return found + [f"- {name}: is gone" for name in sorted(old.schemas.keys() - new.schemas.keys())]


def _command_differences(name: str, old: Command, new: Command) -> Iterator[str]:
    for flag, before in old.options.items():
        after = new.named(flag)
        if after is None:
            yield f"- {name} {flag}"
        else:
            yield from (f"~ {name} {flag}: {told}" for told in _option_differences(before, after))
    for flag, option in new.options.items():
        if not any(old.named(other) for other in (flag, *option.aliases)):
            yield f"+ {name} {flag}"


def _option_differences(old: Option, new: Option) -> Iterator[str]:
    """Help does not tell every default, so one that is not told is no difference."""
    if old.type != new.type:
        yield f"type {old.type} -> {new.type}"
    if set(old.choices) != set(new.choices):
        yield f"choices {', '.join(old.choices)} -> {', '.join(new.choices)}"
    if new.default is not None and str(old.default) != str(new.default):
        yield f"default {old.default} -> {new.default}"


def _node_differences(key: str, old: Node, new: Node) -> Iterator[str]:
    if "any" not in (old.type, new.type) and old.type != new.type:
        yield f"~ {key}: type {old.type} -> {new.type}"
    if new.enum and old.enum and set(old.enum) != set(new.enum):
        yield f"~ {key}: choices {', '.join(old.enum)} -> {', '.join(new.enum)}"
    if not new.properties:
        return
    for name, before in old.properties.items():
        if name not in new.properties:
            yield f"- {key}.{name}"
        else:
            yield from _node_differences(f"{key}.{name}", before, new.properties[name])
    if old.properties:
        yield from (f"+ {key}.{name}" for name in new.properties if name not in old.properties)


def main(words: Sequence[str]) -> int:
    """Capture, compare, write; the number of differences decides the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.engine.trtllm.snapshot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--release", required=True, help="of TensorRT-LLM in the image")
    parser.add_argument("--against", default="1.2.1", help="release of a shipped snapshot to compare with")
    parser.add_argument("--prefix", default="", help="command that runs what follows it inside the image")
    parser.add_argument("--captured", type=Path, default=Path(), help="directory of texts captured before")
    parser.add_argument("--out", type=Path, help="file to write the snapshot to")
    args = parser.parse_args(words)
    known = flags.load(args.against)
    texts = dict(captured(args.release, args.captured, shlex.split(args.prefix)))
    if not texts:
        raise InputError("nothing was captured: give --prefix, or --captured with files")
    made = snapshot_of(args.release, texts, known)
    if args.out:
        args.out.write_text(json.dumps(made.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n")
    found = differences(known, made)
    print("\n".join(found) if found else f"no difference to {args.against}")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except QuantgateError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
