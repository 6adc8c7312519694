"""The probe's part of a decision as tables, one function each: for decision.md and for the report alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipelines.decide import phases
from pipelines.decide.markup import Table, between, number
from pipelines.decide.model import Candidate
from pipelines.decide.phases import Names
from pipelines.decide.probed import Difference, Latency, MetricName, Soundness, Throughput
from pipelines.decide.vetoes import promised

NOT_EVIDENCE = " †"
METRIC: dict[MetricName, str] = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
Rows = list[tuple[str, ...]]


def tables(candidates: Sequence[Candidate], asked: str = "") -> Iterator[Table]:
    """Every table, `asked` before the first; those about what nobody asked for or has are left out."""
    names = phases.names(candidates)
    yield _speed(candidates, asked, names)
    if any(c.probed.differences for c in candidates):
        yield _differences(candidates, names)
    if any(c.promises for c in candidates):
        yield _promises(candidates, names)
    yield _latency(candidates, names)
    yield _throughput(candidates, names)
    if names:
        yield _curves(candidates, names)
    if any(c.probed.saturations for c in candidates):
        yield _saturations(candidates)
    if any(c.probed.drifts for c in candidates):
        yield _drift(candidates)
    if any(c.probed.left_out for c in candidates):
        yield _left_out(candidates)
    yield _soundness(candidates)
    yield _resources(candidates)


def shown(c: Candidate, text: str) -> str:
    """A candidate's name, marked where its latency is that of an emulated format, or of a remote nobody describes."""
    return f"{text} ({c.doubt})" if c.doubt else text


def _speed(candidates: Sequence[Candidate], asked: str, names: Names) -> Table:
    head = ("candidate", "metric", "profile", "times as fast", "interval", "evidence", "note")
    rows: Rows = [
        (c.label, c.speed.metric, place(c.speed.profile, c.speed.phase, c.speed.bucket, names),
         number(c.speed.ratio, ".3f"), between(c.speed.interval, ".3f"), "yes" if c.speed.evidence else "no",
         c.speed.note)
        for c in candidates if c.speed
    ]  # fmt: skip
    return Table("Speed", head, rows, asked)


def place(profile: str, phase: int, bucket: str, names: Names) -> str:
    """A group in words, with what its phase offered."""
    parts = [profile, names.get((profile, phase), ""), f"{bucket} tokens in" if bucket else ""]
    return ", ".join(part for part in parts if part)


def _differences(candidates: Sequence[Candidate], names: Names) -> Table:
    """A row for each group and metric: pairs of requests first, then percentiles of blocks beside each other."""
    head = ("profile", "metric", "candidate", "by request", "ms slower", "pairs", "p50 by block", "p99 by block",
            "rounds")  # fmt: skip
    rows: Rows = []
    for c in candidates:
        lines: dict[tuple[str, int, str, MetricName], dict[str, Difference]] = {}
        for d in c.probed.differences:
            lines.setdefault((d.profile, d.phase, d.bucket, d.metric), {})[d.by] = d
        for (profile, phase, bucket, metric), by in lines.items():
            pairs = by.get("request")
            rows.append(
                (place(profile, phase, bucket, names), METRIC[metric], shown(c, c.label), _times(pairs),
                 "–" if pairs is None else
                 f"{pairs.difference_ms:+.2f} ({between(pairs.difference_interval, '+.2f')})",
                 "–" if pairs is None else str(pairs.pairs), _times(by.get("p50")), _times(by.get("p99")),
                 str(max(d.rounds for d in by.values())))
            )  # fmt: skip
    told = (
        "Times as fast: reference / candidate, with the 95% t interval over rounds. Gaps between tokens have no pairs."
    )
    return Table("Speed against the reference, by request and by block", head, _grouped(rows, 2), told)


def _times(one: Difference | None) -> str:
    return "–" if one is None else f"{one.ratio:.3f} ({between(one.interval, '.3f')})"


def _promises(candidates: Sequence[Candidate], names: Names) -> Table:
    head = ("candidate", "promise", "ms", "at most (95%)", "allowed", "requests", "state", "told")
    rows: Rows = [
        (shown(c, c.label), f"{p.metric} p{p.percentile:g} at {place(p.profile, p.phase, p.bucket, names)}",
         number(p.value, ".1f"), number(p.upper, ".1f"), f"{p.max_ms:g}", str(p.requests), p.state.upper(),
         "" if p.state == "kept" else promised(p))
        for c in candidates for p in c.promises
    ]  # fmt: skip
    return Table("Promises", head, rows)


def _latency(candidates: Sequence[Candidate], names: Names) -> Table:
    """A row for each group and metric, percentiles side by side; what was searched is in the load curve."""
    percentiles = sorted({f.percentile for c in candidates for f in c.latency})
    searched = {s.profile for c in candidates for s in c.probed.saturations}
    head = ("profile", "tokens in", "metric", "candidate", "n", *(f"p{p:g}, ms" for p in percentiles))
    rows: Rows = []
    for c in candidates:
        lines: dict[tuple[str, int, str, MetricName], dict[float, Latency]] = {}
        for f in c.latency:
            if f.profile not in searched:
                lines.setdefault((f.profile, f.phase, f.bucket, f.metric), {})[f.percentile] = f
        for (profile, phase, bucket, metric), found in lines.items():
            first = next(iter(found.values()))
            cells = [_percentile(found.get(p)) for p in percentiles]
            name = shown(c, c.label) + ("" if first.evidence else NOT_EVIDENCE)
            where = place(profile, phase, "", names)
            rows.append((where, bucket, METRIC[metric], name, str(first.requests), *cells))
    told = (
        "With 95% intervals by order statistics. –: the sample is too small for the percentile, or (in brackets) for "
        "its interval. n: gaps between tokens of ITL, requests of all others."
    )
    if any(not f.evidence for c in candidates for f in c.latency):
        told += f" {NOT_EVIDENCE.strip()}: no block of the profile counts, so the row is no evidence."
    return Table("Latency", head, _grouped(rows, 3), told)


def _grouped(rows: Rows, columns: int) -> Rows:
    """Rows that begin alike next to each other, in the order in which each beginning was first seen."""
    firsts = list(dict.fromkeys(row[:columns] for row in rows))
    return [row for first in firsts for row in rows if row[:columns] == first]


def _percentile(figure: Latency | None) -> str:
    if figure is None or figure.value is None:
        return "–"
    return f"{figure.value:.2f} ({between(figure.interval, '.2f')})"


def _throughput(candidates: Sequence[Candidate], names: Names) -> Table:
    searched = {s.profile for c in candidates for s in c.probed.saturations}
    head = ("profile", "tokens in", "candidate", "sent", "answered", "failed as", "requests/s", "input tokens/s",
            "output tokens/s", "total tokens/s", "goodput/s", "kept all promises", "peak MB")  # fmt: skip
    rows: Rows = [
        (place(t.profile, t.phase, "", names), t.bucket or "all",
         shown(c, c.label) + ("" if t.evidence else NOT_EVIDENCE), str(t.requests), percent(t.success), errors(t),
         f"{t.requests_per_s:.2f}", f"{t.input_tokens_per_s:.1f}", f"{t.output_tokens_per_s:.1f}",
         f"{t.total_tokens_per_s:.1f}", number(t.goodput_per_s, ".2f"), percent(t.within_slo),
         number(t.peak_rss_bytes and t.peak_rss_bytes / 1e6, ".0f"))
        for c in candidates for t in c.throughput if t.profile not in searched
    ]  # fmt: skip
    return Table("Throughput", head, _grouped(rows, 2))


def percent(share: float | None) -> str:
    """A share in percent, or a dash."""
    return "–" if share is None else f"{share:.1%}"


def errors(figure: Throughput) -> str:
    """Error classes with their counts."""
    return ", ".join(f"{name} {count}" for name, count in figure.errors.items())


def _curves(candidates: Sequence[Candidate], names: Names) -> Table:
    head = ("profile", "tokens in", "candidate", "offered", "sent", "answered", "requests/s", "output tokens/s",
            "TTFT p50, ms", "TTFT p99", "E2E p50", "E2E p99", "kept all promises")  # fmt: skip
    metrics: tuple[MetricName, ...] = ("ttft_ms", "e2e_ms")
    rows: Rows = []
    for c in candidates:
        for profile in dict.fromkeys(profile for profile, _ in names):
            wanted = [phases.curve(c, profile, metric, p) for metric in metrics for p in (50.0, 99.0)]
            for points in zip(*wanted, strict=True):
                t = points[0].throughput
                name = shown(c, c.label) + ("" if t.evidence else NOT_EVIDENCE)
                rows.append(
                    (profile, points[0].bucket, name, names.get((profile, t.phase), ""),
                     str(t.requests), percent(t.success), f"{t.requests_per_s:.2f}", f"{t.output_tokens_per_s:.1f}",
                     *(number(p.latency, ".1f") for p in points), percent(t.within_slo))
                )  # fmt: skip
    told = "Latencies are of one bucket of input lengths; all other columns are of the whole load that it was part of."
    return Table("Load curve", head, _grouped(rows, 3), told)


def _saturations(candidates: Sequence[Candidate]) -> Table:
    head = (
        "candidate",
        "profile",
        "saturates at, requests/s",
        "interval",
        "kept by round",
        "failed by round",
        "promise",
    )
    rows: Rows = [
        (shown(c, c.label) + ("" if s.evidence else NOT_EVIDENCE), s.profile,
         number(s.rate, ".3g") + (" at least" if s.at_least and s.rate else ""),
         between(s.interval, ".3g"), ", ".join(number(r, ".3g") for r in s.by_round),
         ", ".join(number(r, ".3g") for r in s.failed_by_round), s.promise)
        for c in candidates for s in c.probed.saturations
    ]  # fmt: skip
    told = "The highest rate searched that kept the promise; the true one lies between it and the rate that failed."
    return Table("Saturation", head, rows, told)


def _drift(candidates: Sequence[Candidate]) -> Table:
    head = ("candidate", "profile", "metric", "from first to last block", "interval", "blocks", "medians in order, ms")
    rows: Rows = [
        (shown(c, c.label), d.profile, METRIC[d.metric], number(d.change, "+.1%"), between(d.interval, "+.1%"),
         str(sum(not s.left_out for s in d.spots)),
         ", ".join(f"({s.value:.1f})" if s.left_out else f"{s.value:.1f}" for s in d.spots))
        for c in candidates for d in c.probed.drifts
    ]  # fmt: skip
    return Table("Drift over blocks", head, rows, "Medians in brackets were left out.")


def _left_out(candidates: Sequence[Candidate]) -> Table:
    head = ("candidate", "profile", "round", "why it is no evidence")
    rows: Rows = [(c.label, b.profile, str(b.round), b.reason) for c in candidates for b in c.probed.left_out]
    return Table("Blocks left out", head, rows)


def _soundness(candidates: Sequence[Candidate]) -> Table:
    head = ("candidate", "profile", "schedule lag p50, ms", "p99", "most", "allowed", "client", "steady blocks",
            "answers of another length", "token counts that disagree", "prompt lengths that disagree",
            "prefix hits")  # fmt: skip
    rows: Rows = [
        (c.label, s.profile, number(s.lag_p50_ms, ".2f"), number(s.lag_p99_ms, ".2f"), number(s.lag_max_ms, ".2f"),
         number(s.lag_limit_ms, ".2f"), client(s), f"{s.steady_blocks} of {s.blocks}",
         f"{s.other_lengths} of {s.answered}", counts(s), f"{s.input_mismatches} of {s.answered}", hits(s))
        for c in candidates for s in c.probed.soundness
    ]  # fmt: skip
    return Table("Client and counts", head, rows)


def client(one: Soundness) -> str:
    """Whether requests were sent in time, where they had one."""
    return "no schedule" if one.lag_limit_ms is None else "too slow: no evidence" if one.late else "in time"


def counts(one: Soundness) -> str:
    """How many answers two counts disagree on, of those that have both."""
    return f"{one.token_mismatches} of {one.compared_tokens}" if one.compared_tokens else "one count only"


def hits(one: Soundness) -> str:
    """The measured hit rate and who told it."""
    return "not told" if one.prefix_hits is None else f"{one.prefix_hits:.1%} ({one.prefix_source})"


def _resources(candidates: Sequence[Candidate]) -> Table:
    head = ("candidate", "profile", "ready, s", "RSS idle, MB", "loaded", "peak", "CPU, %", "GPU memory idle, MB",
            "loaded", "peak", "GPU, %", "power, W", "J per output token", "GPU, °C", "SM clock, MHz", "KV cache",
            "queue")  # fmt: skip
    rows: Rows = [
        (c.label, r.profile, number(r.ready_s, ".1f"), _mb(r.idle_rss_bytes), _mb(r.loaded_rss_bytes),
         _mb(r.peak_rss_bytes), number(r.cpu_percent, ".0f"), _mb(r.gpu_memory_idle_bytes),
         _mb(r.gpu_memory_loaded_bytes), _mb(r.gpu_memory_peak_bytes),
         number(r.gpu_utilisation_percent, ".0f"), number(r.gpu_power_w, ".0f"),
         number(r.energy_per_output_token_j, ".4g"), number(r.gpu_temperature_c, ".0f"), number(r.gpu_clock_mhz, ".0f"),
         percent(r.kv_usage_peak), number(r.queue_peak, ".0f"))
        for c in candidates for r in c.probed.resources
    ]  # fmt: skip
    return Table("Resources", head, rows, "–: not available; the conditions say why.")


def _mb(value: int | None) -> str:
    return number(value and value / 1e6, ".0f")
