"""How far a probe is and how long the rest will take, from what its loads and server starts took so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pipelines.probe.rounds import Load, Round

Report = Callable[[int, int, str, float | None], None]


@dataclass(slots=True)
class _Seen:
    """What one profile's loads took, in seconds, and how many are left; `requests` and `due_s` are of one load."""

    requests: int
    due_s: float | None
    left: int
    took_s: list[float] = field(default_factory=list)


class Pace:
    """Told of every load and turn as it ends, it reports requests done, and the seconds left once it can tell."""

    def __init__(self, rounds: Sequence[Round], engines: int, report: Report) -> None:
        loads = [load for one in rounds for load in one.loads]
        counts = Counter(load.profile.name for load in loads)
        self._profiles = {
            load.profile.name: _Seen(load.most, _due_s(load), engines * counts[load.profile.name]) for load in loads
        }
        self._turns_left, self._between_s = engines * len(rounds), [0.0]
        self._in_loads_s = 0.0
        self._total, self._done = engines * sum(load.most for load in loads), 0
        self._report = report

    def load_ended(self, load: Load, seconds: float | None) -> None:
        """Take note of a load; without seconds it was not sent."""
        seen = self._profiles[load.profile.name]
        seen.left -= 1
        if seconds is not None:
            seen.took_s.append(seconds)
            self._in_loads_s += seconds
        self._done += load.most
        self._report(self._done, self._total, "requests", self.left_s())

    def turn_ended(self, seconds: float) -> None:
        """Take note of a server's whole time: what was not load was start, warm-up and stop."""
        self._turns_left -= 1
        self._between_s = [*(self._between_s if self._between_s != [0.0] else []), seconds - self._in_loads_s]
        self._in_loads_s = 0.0

    def left_s(self) -> float | None:
        """Seconds left: each load still to come as long as its like took, or its schedule is, or by its requests."""
        rates = [seconds / seen.requests for seen in self._profiles.values() for seconds in seen.took_s]
        left = 0.0
        for seen in self._profiles.values():
            if not seen.left:
                continue
            if seen.took_s:
                each = fmean(seen.took_s)
            elif seen.due_s is not None:
                each = seen.due_s
            elif rates:
                each = fmean(rates) * seen.requests
            else:
                return None
            left += seen.left * each
        return left + max(0, self._turns_left - 1) * fmean(self._between_s)


def _due_s(load: Load) -> float | None:
    """When the last request is due, of a load with a schedule; a search has several, of which it sends some."""
    due = [arrival.due_s for arrival in load.arrivals]
    last = due[-1]
    return last if last is not None and load.most == len(due) else None
