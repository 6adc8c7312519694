"""The decision as data: what `decision.json` holds, and all that a report or a tracker needs to know."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.config import Strict
from pipelines.decide.interval import Interval
from pipelines.decide.probed import Latency, Probed, Speed, Throughput
from pipelines.divergence.figures import Row

VerdictName = Literal["invalid", "veto", "fail", "inconclusive", "pass"]
Outcome = Literal["promote", "hold", "reject"]


class Verdict(Strict):
    """One paired comparison of a candidate with a reference on one slice of one eval set.

    Scores are in the metric's own unit. `loss` is how much worse the candidate is (positive is worse,
    whatever the metric's direction); non-inferior means the interval of `loss` lies below `margin`.
    A verdict with `gates` false is shown but does not decide.

    margin: in the metric's own unit, also where it was given as a share of the reference's score (`relative`).
    alpha: the one-sided level it was judged at. Of binary metrics `both_right`, `gains`, `losses` and `both_wrong` are
    the 2x2 table; `newcombe` and `mcnemar_p` are what other methods make of it, and decide nothing.
    """

    eval_set: str
    slice: str
    metric: str
    higher_is_better: bool
    binary: bool
    items: int
    clusters: int | None
    reference_score: float | None
    score: float | None
    loss: float | None
    interval: Interval | None
    margin: float
    gains: int | None
    losses: int | None
    p_value: float | None
    method: str
    verdict: VerdictName
    more_items: int | None
    note: str
    gates: bool = True
    against: Literal["reference", "champion"] = "reference"
    alpha: float = 0.05
    relative: float | None = None
    both_right: int | None = None
    both_wrong: int | None = None
    newcombe: Interval | None = None
    mcnemar_p: float | None = None

    @property
    def flips(self) -> int | None:
        """Items that changed either way."""
        return None if self.gains is None or self.losses is None else self.gains + self.losses


VetoKind = Literal[
    "build", "not_finite", "empty", "loop", "length", "must_pass", "perplexity", "memory", "engine_loss", "divergence",
    "slo", "licence", "label",
]  # fmt: skip


class Veto(Strict):
    """What rules a candidate out whatever its scores: of which kind, where (an eval set, a profile), and in words."""

    kind: VetoKind
    where: str = ""
    text: str


class Outputs(Strict):
    """What answers on one eval set look like; the length ratio is to the reference's, on the same items."""

    eval_set: str
    items: int
    generated: int
    truncated: int
    empty: int
    cut: int
    looping: int
    not_finite: int
    mean_tokens_out: float | None
    length_ratio: float | None
    length_interval: Interval | None


class Bucket(Strict):
    """Both sides' scores on items whose prompts take `least` tokens or more, and less than `below`; shown only."""

    eval_set: str
    least: int
    below: int | None
    items: int
    reference_score: float
    score: float
    loss: float
    losses: int
    gains: int


class Promise(Strict):
    """A percentile held against its limit: kept, broken, or open where the requests cannot tell.

    upper and lower: one-sided 95% bounds by order statistics; None where there are too few requests for one.
    phase and bucket: the group of the profile that it was held against.
    """

    profile: str
    metric: str
    percentile: float
    max_ms: float
    value: float | None
    lower: float | None
    upper: float | None
    requests: int
    requests_needed: int
    state: Literal["kept", "broken", "open"]
    phase: int = 0
    bucket: str = ""


class Noise(Strict):
    """What changed on one eval set when the reference engine was scored again: items both times, scores up and down."""

    eval_set: str
    items: int
    gains: int
    losses: int
    answers_changed: int
    mean_change: float

    @property
    def flips(self) -> int:
        """Items whose score changed."""
        return self.gains + self.losses


class Candidate(Strict):
    """A variant in an engine, with every figure and verdict about it.

    served_on: of a server that somebody else runs, its device as far as it is stated; empty of our own.
    """

    label: str
    variant: str
    engine: str
    reference: bool
    status: Literal["ok", "failed"]
    failure: str | None
    quantizer: str
    scheme: str
    library: str
    target: str
    native: bool
    native_note: str
    served_on: str = ""
    simulated: bool = False
    unjudged: str = ""
    keys: dict[str, str]
    variant_bytes: int | None
    engine_bytes: int | None
    perplexity: float | None
    engine_kl: float | None
    scores: dict[str, float]
    mean_score: float | None
    verdicts: tuple[Verdict, ...]
    latency: tuple[Latency, ...]
    throughput: tuple[Throughput, ...]
    speed: Speed | None
    pareto: bool
    outcome: Outcome | None
    reasons: tuple[str, ...]
    labels: dict[str, str] = Field(default_factory=dict)
    goodput: float | None = None
    lengths: tuple[Bucket, ...] = ()
    divergences: tuple[Row, ...] = ()
    outputs: tuple[Outputs, ...] = ()
    promises: tuple[Promise, ...] = ()
    vetoes: tuple[Veto, ...] = ()
    undecided: tuple[Veto, ...] = ()
    probed: Probed = Probed()

    @property
    def doubt(self) -> Literal["", "emulated", "remote"]:
        """Why its latency is no evidence about the variant: its engine emulates the format, or nobody states where it
        runs and in which format."""
        if self.native or self.status == "failed":
            return ""
        return "remote" if self.served_on else "emulated"


class Standing(Strict):
    """One candidate among those that pass. Ratios are to the reference, above 1 is better; a share of 1 means that it
    comes first whatever the weights."""

    label: str
    score: float
    ratios: dict[str, float]
    first_share: float
    cost_per_1000_tokens: float | None


class Choice(Strict):
    """How the winner was chosen, best first: weights of the role, what was not measured on all, who was off the front.

    The score is the weighted sum of log-ratios.
    """

    role: str
    weights: dict[str, float]
    left_out: tuple[str, ...]
    off_front: tuple[str, ...]
    standings: tuple[Standing, ...]
    currency: str


class Decision(Strict):
    """What to do, why, under which conditions, and what evidence would change it."""

    version: Literal[1]
    campaign: str
    outcome: Outcome
    winner: str | None
    headline: str
    detail: str
    would_change: tuple[str, ...]
    reference: str
    candidates: tuple[Candidate, ...]
    gate: dict[str, object]
    conditions: dict[str, str]
    base: dict[str, str]
    choice: Choice | None = None
    noise: tuple[Noise, ...] = ()
