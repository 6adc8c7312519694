"""The command line: `quantgate VERB [overrides]`. Tables for people on stdout; with --json one JSON document last.

Exit codes: 0 promote (or the verb did its work), 3 hold, 4 reject, 1 failed, 2 bad configuration or input, 6 this
machine cannot, 7 evidence missing or unlike, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pipelines import __version__
from pipelines.errors import ConfigError, EnvironmentProblem, InputError, QuantgateError, closest

OUTCOME_CODES = {"promote": 0, "hold": 3, "reject": 4}
INTERRUPTED = 130
UI_PORT = 5000
PORTS = range(1, 65536)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb ends with: its exit code and the document that --json prints."""

    code: int
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: what it does, and whether it takes Hydra overrides."""

    summary: str
    run: Callable[[argparse.Namespace], Answer]
    overrides: bool = False
    arguments: Callable[[argparse.ArgumentParser], None] | None = None


def entry() -> None:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one verb and return its exit code; errors of ours become one message, never a traceback."""
    verbs = _verbs()
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(verbs))
        return 0
    if argv[0] == "--version":
        print(f"quantgate {__version__}")
        return 0
    if argv[0] not in verbs:
        print(f"error: no verb {argv[0]!r}; {closest(argv[0], verbs)}", file=sys.stderr)
        return ConfigError.exit_code
    as_json = "--json" in argv
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        answer = verbs[argv[0]].run(_parser(argv[0], verbs[argv[0]]).parse_intermixed_args(list(argv[1:])))
    except QuantgateError as error:
        return _complain(argv[0], error, as_json=as_json)
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:  # disk full, no permission, read-only: this machine's, not a fault to trace
        where = f"{error.filename}: " if error.filename else ""
        return _complain(argv[0], EnvironmentProblem(f"{where}{error.strerror or error}"), as_json=as_json)
    except KeyboardInterrupt:
        said = "interrupted; what was finished is kept, run the same command again to go on"
        print(said, file=sys.stderr)
        if as_json:
            print(json.dumps({"verb": argv[0], "exit_code": INTERRUPTED, "error": "Interrupted", "message": said}))
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        print(json.dumps({"verb": argv[0], "exit_code": answer.code, **answer.document}, default=str))
    return answer.code


def _complain(verb: str, error: QuantgateError, *, as_json: bool) -> int:
    from pipelines.track.masking import masked_text  # what is wrong with an address must not show its password

    message = masked_text(str(error))
    lines = message.splitlines() or [type(error).__name__]
    problems = error.problems if isinstance(error, ConfigError) else ()
    if len(problems) > 1:
        print(f"error: {len(problems)} problems in the configuration", file=sys.stderr)
        lines = [f"  {line}" for line in lines]
    else:
        lines[0] = f"error: {lines[0]}"
    print("\n".join(lines), file=sys.stderr)
    if as_json:
        told = {"verb": verb, "exit_code": error.exit_code, "error": type(error).__name__, "message": message}
        print(json.dumps(told))
    return error.exit_code


class _Parser(argparse.ArgumentParser):
    """Complains about a command line as about any other bad input, so that --json has its document then too."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; `{self.prog} --help` says what is allowed")


def _parser(name: str, verb: Verb) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"quantgate {name}", description=verb.summary, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON document as the last line of stdout")
    if verb.overrides:
        parser.add_argument(
            "overrides", nargs="*", help="Hydra overrides: variant=[baseline,awq_w4a16_g64] gate.alpha=0.01"
        )
        parser.add_argument("--config-dir", help="a conf/ directory of your own instead of the shipped one")
    if verb.arguments:
        verb.arguments(parser)
    return parser


def _help(verbs: dict[str, Verb]) -> str:
    width = max(map(len, verbs))
    lines = [f"  {name:{width}} {verb.summary}" for name, verb in verbs.items()]
    return "\n".join(
        [
            "usage: quantgate VERB [overrides] [--json]",
            "",
            "Take a base checkpoint through quantization and engine builds to an engine that may be promoted,",
            "and prove why.",
            "",
            *lines,
            "",
            "`quantgate VERB --help` says more. Exit codes: 0 promote or done, 3 hold, 4 reject, 1 failed,",
            "2 bad configuration or input, 6 this machine cannot, 7 evidence missing or unlike, 130 interrupted.",
        ]
    )


def _sweepable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="run once for every combination of comma-separated overrides"
    )


def _self_testable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--self-test", action="store_true", help="measure the client against a server of known timing")
    parser.add_argument("--rates", type=_rates, help="with --self-test: requests a second (default: 20,100,300)")
    parser.add_argument("--seconds", type=_positive, help="with --self-test: at each rate (default: 10)")


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _listable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="list every step, however many there are")


def _promotable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--actor", help="who promotes; default: the user this runs as")
    parser.add_argument("--override", metavar="REASON", help="promote without a decision of promote, for this reason")
    parser.add_argument("--candidate", help="with --override: which candidate")


def _repairable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repair", action="store_true", help="first finish or undo a promotion or rollback that a crash cut short"
    )


def _reversible(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--actor", help="who rolls back; default: the user this runs as")
    parser.add_argument("--reason", help="why; kept in the ledger")


def _reassessable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="score and probe once more, though nothing changed")
    parser.add_argument("--as-is", action="store_true", help="judge the champion's engine as it is; rebuild nothing")
    parser.add_argument("--dry-run", action="store_true", help="only say what changed and which steps would run")


def _bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", help="directory, or .tar, to write; default: one in bundles/ named after the engine")
    parser.add_argument("--unpromoted", action="store_true", help="bundle what nobody promoted, and say so inside")
    parser.add_argument("--candidate", help="which; default: the champion, with --unpromoted the decision's winner")


def _viewable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port_number, default=UI_PORT, help="loopback port of the MLflow server")
    parser.add_argument(
        "--browser",
        action=argparse.BooleanOptionalAction,
        help="open the link in a browser; default: at a terminal on this machine's own display",
    )


def _port_number(text: str) -> int:
    number = int(text)
    if number not in PORTS:
        raise argparse.ArgumentTypeError(f"{number} is no port: {PORTS.start} to {PORTS.stop - 1}")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def _rollable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("plan", "check"), help="write a rollout's plan; judge one of its steps")
    parser.add_argument("words", nargs="*", metavar="PLAN|override", help="check: plan.yaml first; then overrides")
    parser.add_argument("--config-dir", help="a conf/ directory of your own instead of the shipped one")
    parser.add_argument("--model-version", help="plan: of this version, against the champion; default: the champion")
    parser.add_argument("--out", help="plan: directory to write under; default: rollouts/ beside the ledger")
    parser.add_argument("--step", type=_count, help="check: which step of the plan")
    parser.add_argument("--data", metavar="FILE", help="check: JSON lines, one for each request of both arms")
    parser.add_argument("--mlflow-run", metavar="RUN", help="check: a run that holds them, instead of a file")


def _gc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", type=_count, default=3, help="decisions kept per campaign, newest first")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")


def _resumable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", required=True,
        help="upload every campaign of the store, or the one campaign= or experiment= names, that is not there yet",
    )  # fmt: skip


def _comparable(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "things", nargs="+", metavar="NAME",
        help="the base, then what is compared with it: a label of the newest decision, campaign/label, "
        "campaign@key/label, the beginning of an engine's key, a campaign or decision, @champion, model@alias; "
        "an argument with = is an override",
    )  # fmt: skip
    parser.add_argument("--anyway", action="store_true", help="compare what is not like with like too, and mark it")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts that needs nothing else")
    parser.add_argument("--confidence", type=_confidence, default=0.95, help="of every interval, two-sided")
    parser.add_argument("--config-dir", help="a conf/ directory of your own instead of the shipped one")


def _confidence(text: str) -> float:
    number = float(text)
    if not 0.5 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 0.5 or more, and below 1")
    return number


def _toolchain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "sync", "check"), help="show them; make them; compare with locks")
    parser.add_argument(
        "names", nargs="*", help="toolchains, all where none is named; an argument with = is an override"
    )
    parser.add_argument("--config-dir", help="a conf/ directory of your own instead of the shipped one")


def _verbs() -> dict[str, Verb]:
    def lazily(module: str, function: str) -> Callable[[argparse.Namespace], Answer]:
        def run(args: argparse.Namespace) -> Answer:
            from importlib import import_module

            answer: Answer = getattr(import_module(module), function)(args)
            return answer

        return run

    campaign, keeping = "pipelines.verbs.campaign", "pipelines.verbs.store"
    release = "pipelines.verbs.release"
    return {
        "plan": Verb("show every step, reused or to do and why, its time and size, and every problem at once",
                     lazily(campaign, "plan"), True, _listable),
        "run": Verb("take a campaign from the base checkpoint to a decision, a report and MLflow",
                    lazily(campaign, "run"), True, _sweepable),
        "score": Verb("run a campaign as far as its scores", lazily(campaign, "score"), True),
        "probe": Verb("run a campaign as far as scores and latency; --self-test measures the probe's own error",
                      lazily("pipelines.verbs.probe", "probe"), True, _self_testable),
        "decide": Verb("run a campaign as far as its decision and report", lazily(campaign, "decide"), True),
        "promote": Verb("make the winner of a decision the champion", lazily(release, "promote"), True, _promotable),
        "rollback": Verb("make the champion before it the champion again",
                         lazily(release, "rollback"), True, _reversible),
        "history": Verb("show every promotion and rollback: when, who, why, and how it ended",
                        lazily(release, "history"), True),
        "verify-ledger": Verb("hold the ledger against itself, what it refers to, and the registry's aliases",
                              lazily(release, "verify_ledger"), True, _repairable),
        "reassess": Verb("judge the champion again on new items, toolchains or a new base, and say what changed",
                         lazily("pipelines.verbs.reassess", "reassess"), True, _reassessable),
        "bundle": Verb("write what one deploys of the champion: engine, serve command, evidence, licence",
                       lazily("pipelines.verbs.bundle", "bundle"), True, _bundle),
        "compare": Verb("set engines, candidates or campaigns side by side: differences, intervals, conditions",
                        lazily("pipelines.verbs.compare", "compare"), False, _comparable),
        "canary": Verb("plan the rollout of a promoted engine; judge a step: continue (0), hold (3), roll back (4)",
                       lazily("pipelines.verbs.canary", "canary"), False, _rollable),
        "status": Verb("show the decisions made here", lazily(keeping, "status"), True),
        "track": Verb("record in MLflow what is not recorded there yet",
                      lazily("pipelines.verbs.tracking", "track"), True, _resumable),
        "ui": Verb("open the results in MLflow", lazily("pipelines.verbs.ui", "ui"), True, _viewable),
        "doctor": Verb("say what this machine can do and what is missing",
                       lazily("pipelines.verbs.doctor", "doctor"), True),
        "toolchain": Verb("list, make or check the interpreters that stages can run in",
                          lazily("pipelines.verbs.toolchain", "toolchain"), False, _toolchain),
        "gc": Verb("remove what no recent decision, ledger entry or registry alias reaches",
                   lazily(keeping, "gc"), True, _gc),
        "verify": Verb("hash every artifact again and name what differs", lazily(keeping, "verify"), True),
    }  # fmt: skip
