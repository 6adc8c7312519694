"""Write every items.jsonl of this folder from `sources/*.yaml` and the GSM8K test file; same inputs, same bytes.

Run: python evalsets/make_items.py --gsm8k path/to/gsm8k/test.jsonl [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
SEED = "quantgate-1"
Row = dict[str, Any]
Source = dict[str, Any]


def source(name: str) -> Source:
    """Read sources/<name>.yaml."""
    loaded: Source = yaml.safe_load((HERE / "sources" / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded


def stream(name: str) -> random.Random:
    """A random stream of its own for each set, so that editing one set leaves the others as they are."""
    return random.Random(f"{SEED}:{name}")


class Entities:
    """Draws values for the slots of a template, all from one random stream."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lists: dict[str, list[str]] = source("entities")

    def draw(self) -> dict[str, str]:
        """One value for every slot; numbers in the ranges a shop sees."""
        rng = self.rng
        values = {name: rng.choice(options) for name, options in self.lists.items()}
        order, wrong = rng.sample(range(10_000, 99_999), 2)
        values |= {"order": str(order), "wrong_order": str(wrong), "n": str(rng.randint(3, 19))}
        values |= {"amount": str(rng.randint(12, 480)), "phone": f"{rng.randint(0, 9999):04d}"}
        values["other"] = rng.choice([i for i in self.lists["item"] if i != values["item"]])
        return values


def deal(rng: random.Random, options: list[Any]) -> Iterator[Any]:
    """Options in random order, again and again, so that each is used equally often."""
    while True:
        yield from rng.sample(options, len(options))


def typo(rng: random.Random, text: str) -> str:
    """Swap two neighbouring letters inside one longer word."""
    spots = list(re.finditer(r"\b[a-z]{5,}\b", text))
    if not spots:
        return text
    at = rng.choice(spots).start() + rng.randint(1, 2)
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


# --- support_intent -------------------------------------------------------------------------------------------------

GREETINGS = ["Hello,", "Dear support team,", "Hi,", "Good morning,", "Dear Sir or Madam,", "Hi team,", "Good evening,"]
CLOSINGS = ["Kind regards,", "Thanks,", "Best wishes,", "Thank you,", "Many thanks,", "Yours,"]
CHAT_OPENERS = ["hi, ", "hey ", "hello?? ", "", "", "quick one: ", "ok so ", "hi there "]
CHAT_CLOSERS = ["", "", " thx", " please", " can someone help", "??", " asap", " :("]


def as_email(rng: random.Random, text: str, e: dict[str, str]) -> str:
    """Greeting and signature around the message."""
    return f"{rng.choice(GREETINGS)} {text} {rng.choice(CLOSINGS)} {e['first']} {e['last']}"


def as_chat(rng: random.Random, text: str, _: dict[str, str]) -> str:
    """Lower case, no full stop, one slip of the finger in two messages of three."""
    text = text.lower().rstrip(".")
    if rng.random() < 0.66:
        text = typo(rng, text)
    return rng.choice(CHAT_OPENERS) + text + rng.choice(CHAT_CLOSERS)


def as_note(_: random.Random, text: str, e: dict[str, str]) -> str:
    """An agent's jotting with the caller's name."""
    return f"{e['first']} {e['last']} on the phone. {text}"


CHANNELS: dict[str, tuple[str, Callable[[random.Random, str, dict[str, str]], str], int]] = {
    "email": ("said", as_email, 14),
    "chat": ("said", as_chat, 14),
    "phone_note": ("noted", as_note, 12),
}


def support_intent() -> Iterator[Row]:
    """Forty messages for each intent, spread over three channels."""
    rng, intents = stream("support_intent"), source("intents")
    entities = Entities(rng)
    for gold, (name, intent) in enumerate(intents.items()):
        lines = {kind: deal(rng, intent[kind]) for kind in ("said", "noted")}
        for channel, (kind, style, count) in CHANNELS.items():
            for _ in range(count):
                e = entities.draw()
                text = style(rng, str(next(lines[kind])).format(**e), e)
                yield {"slice": channel, "message": text, "intent": name, "gold": gold}


# --- ticket_json ----------------------------------------------------------------------------------------------------


def ticket_json() -> Iterator[Row]:
    """Tickets in three styles, each with one true order number, item and kind of problem."""
    rng, bank = stream("ticket_json"), source("tickets")
    entities = Entities(rng)
    kinds = deal(rng, list(bank["problems"]))
    phrases = {kind: deal(rng, options) for kind, options in bank["problems"].items()}
    for style in ("plain", "wordy", "noisy"):
        lines = deal(rng, bank[style])
        for _ in range(108):
            e, kind = entities.draw(), next(kinds)
            text = str(next(lines)).format(problem=str(next(phrases[kind])).format(**e), **e)
            answer = {"order": e["order"], "item": e["item"], "problem": kind}
            yield {"slice": style, "ticket": text[0].upper() + text[1:], "answer": json.dumps(answer)}


# --- passage_qa -----------------------------------------------------------------------------------------------------


def passage_qa() -> Iterator[Row]:
    """Five passages in each of twelve domains, five questions on each; a passage is a cluster."""
    rng, domains = stream("passage_qa"), source("passages")
    entities = source("entities")
    orgs = deal(rng, entities["org"])
    for name, domain in domains.items():
        values = [rng.sample(fact["v"], 5) for fact in domain["facts"]]
        for version in range(5):
            order = rng.sample(range(len(domain["facts"])), 5)
            city = rng.choice(entities["city"])
            parts = [domain["intro"][version % 3].format(org=next(orgs), city=city)]
            asked = []
            for f in order:
                fact, value = domain["facts"][f], values[f][version]
                said = rng.choice(fact["say"]).format(v=value)
                parts.append(said[0].upper() + said[1:])
                asked.append((rng.choice(fact["ask"]), value))
            cluster = f"{name.replace(' ', '_')}_{version + 1}"
            for question, value in rng.sample(asked, 5):
                yield {"slice": kind_of_answer(value), "cluster": cluster, "passage": " ".join(parts),
                       "question": question, "answers": [value]}  # fmt: skip


def kind_of_answer(value: str) -> str:
    """The slice: does the answer hold a quantity or is it words only?"""
    numbers = r"\d|\b(one|two|three|four|five|six|seven|eight|ten|twelve|noon|midnight|half)\b"
    return "quantity" if re.search(numbers, value) else "words"


# --- gsm8k_choice ---------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\d.,/])\d[\d,]*(?:\.\d+)?(?![\d/])")


def gsm8k_rows(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Line number, question and the worked steps without calculator marks."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        solution = re.sub(r"<<.*?>>", "", row["answer"]).split("\n#### ")[0]
        steps = [re.sub(r"\s+", " ", step).strip() for step in solution.split("\n") if step.strip()]
        yield number, re.sub(r"\s+", " ", row["question"]).strip(), steps


def final_result(last: str) -> re.Match[str] | None:
    """The number after the last equals sign: a whole number of at least 4 that stands nowhere else in the step."""
    equals = last.rfind("=")
    match = NUMBER.search(last, equals + 1) if equals >= 0 else None
    if match is None or "." in match.group() or whole(match.group()) < 4:
        return None
    return match if [m.group() for m in NUMBER.finditer(last)].count(match.group()) == 1 else None


def whole(text: str) -> int:
    """A whole number, thousands separated or not."""
    return int(text.replace(",", ""))


def near_misses(rng: random.Random, value: int) -> list[int]:
    """Three results that slips of a digit or of a carry would give."""
    close = {value + step for step in (-10, -5, -2, -1, 1, 2, 5, 10)} | {int(str(value)[::-1])}
    return rng.sample(sorted(near for near in close if near > 0 and near != value), 3)


def gsm8k_choice(path: Path) -> Iterator[Row]:
    """Test items short enough for a small model: which result does the last step of the true solution have?"""
    rng = stream("gsm8k_choice")
    fit = []
    for number, question, steps in gsm8k_rows(path):
        result = final_result(steps[-1]) if 2 <= len(steps) <= 4 else None
        if result is not None and len(question) + sum(map(len, steps)) < 430:
            fit.append((number, question, steps, result))
    for number, question, steps, result in sorted(rng.sample(fit, 320)):
        like = "{:,}" if "," in result.group() else "{}"
        true = whole(result.group())
        values = rng.sample([true, *near_misses(rng, true)], 4)
        before, after = steps[-1][: result.start()], steps[-1][result.end() :]
        yield {
            "id": f"gsm8k_test_{number:04d}",
            "slice": ("two_steps", "three_steps", "four_steps")[len(steps) - 2],
            "question": question,
            "steps": " ".join(sentence(step) for step in steps[:-1]),
            "choices": [sentence(before + like.format(value) + after) for value in values],
            "gold": values.index(true),
        }


def sentence(step: str) -> str:
    """A step with a full stop."""
    return step if step[-1] in ".!?" else step + "."


# --- heldout_text and calibration ------------------------------------------------------------------------------------


def heldout_text() -> Iterator[Row]:
    """Whole documents, each on one line."""
    for kind, documents in source("heldout").items():
        for text in documents:
            yield {"slice": kind, "text": re.sub(r"\s+", " ", text).strip()}


def calibration() -> Iterator[Row]:
    """Dialogues of two exchanges and sums worked out, in turn; every text differs."""
    rng, bank = stream("calibration"), source("calibration")
    scenarios: dict[str, list[list[str]]] = bank["scenarios"]
    entities, names = Entities(rng), deal(rng, list(scenarios))
    first = {name: deal(rng, list(range(len(turns[0])))) for name, turns in scenarios.items()}
    second = {name: deal(rng, list(range(len(turns[2])))) for name, turns in scenarios.items()}
    problems = deal(rng, bank["maths"])
    for k in range(320):
        if k % 8 == 7:
            yield {"kind": "maths", "messages": [m for _ in range(2) for m in worked(rng, next(problems))]}
            continue
        name = next(names)
        e, i, j = entities.draw(), next(first[name]), next(second[name])
        lines = [turn[at].format(**e) for turn, at in zip(scenarios[name], (i, i, j, j), strict=True)]
        yield {"kind": name, "messages": [message(at, line) for at, line in enumerate(lines)]}


def message(at: int, content: str) -> dict[str, str]:
    """A turn of a dialogue; the user begins."""
    return {"role": ("user", "assistant")[at % 2], "content": content}


def worked(rng: random.Random, problem: dict[str, str]) -> list[dict[str, str]]:
    """A sum with numbers filled in, and its solution."""
    a, b = rng.randint(3, 19), rng.randint(20, 60)
    c = rng.randint(70, 180)
    values = {"a": a, "b": b, "c": c, "ab": a * b, "ac": a * c, "a2": 2 * a, "a3": 3 * a, "a3b": 3 * a + b}
    values |= {"bc": b + c, "q": (b + c) // a, "r": (b + c) % a, "a12": 12 * a, "a10": 10 * a, "ba10": b * 10 * a}
    values |= {"ba2": b * 2 * a, "cb": c - b, "q2": (c - b) // a, "r2": (c - b) % a}
    return [message(at, problem[part].format(**values)) for at, part in enumerate("qs")]


# --- writing ---------------------------------------------------------------------------------------------------------


def write(name: str, rows: Iterator[Row]) -> int:
    """Number the rows that have no id of their own and write them, one JSON object a line; equal rows are left out."""
    seen: set[str] = set()
    lines: list[str] = []
    for row in rows:
        body = json.dumps(row, ensure_ascii=False)
        if body not in seen:
            seen.add(body)
            own = {} if "id" in row else {"id": f"{name}_{len(lines) + 1:04d}"}
            lines.append(json.dumps(own | row, ensure_ascii=False))
    (HERE / name).mkdir(exist_ok=True)
    (HERE / name / "items.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return len(lines)


OWN: dict[str, Callable[[], Iterator[Row]]] = {
    make.__name__: make for make in (support_intent, ticket_json, passage_qa, heldout_text, calibration)
}


def main() -> int:
    """Write the sets asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test.jsonl; without it gsm8k_choice stays as it is")
    parser.add_argument("--only", nargs="*", choices=[*OWN, "gsm8k_choice"], help="write these sets alone")
    args = parser.parse_args()
    makers = dict(OWN)
    if args.gsm8k is not None:
        makers["gsm8k_choice"] = lambda: gsm8k_choice(args.gsm8k)
    for name, make in makers.items():
        if args.only is None or name in args.only:
            print(f"{name:15} {write(name, make()):4d} items")
    return 0


if __name__ == "__main__":
    sys.exit(main())
