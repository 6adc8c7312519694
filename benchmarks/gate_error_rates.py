"""How often does the gate promote a variant that is exactly at the margin? At most 5%, whatever the campaign.

Simulated campaigns: truth at the margin (two points up to 500 items, one point above), every variant of a campaign at
it, over items, flips, clusters, variants and looks. Beside the gate stand three that others use: the point estimate,
the interval of two independent proportions (at an accuracy of 0.7), and "McNemar says not significant". A second table
compares the power that `quantgate plan` promises with the power that lossless variants have.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from outcome import conclude, conditions
from scipy.stats import norm, t

from pipelines.decide import stats
from pipelines.decide.looks import nominal_alpha

Array = NDArray[np.float64]
ALPHA, ICC, CLUSTER, ACCURACY, SEED = 0.05, 0.1, 5, 0.7, 20260101
ITEMS, FLIPS, VARIANTS, LOOKS = (200, 500, 1000, 2000), (0.02, 0.05, 0.10), (1, 3, 6, 12), (1, 2, 3)
SHARES = {1: (1.0,), 2: (0.5, 1.0), 3: (1 / 3, 2 / 3, 1.0)}
GATES = ("quantgate", "point estimate", "unpaired interval", "McNemar n.s.")
SURE = 3.7  # standard errors: a row at 5% exactly is blamed in one of some 9,000
CELLS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Counts:
    """Gains, losses and sums of squares of whole clusters, one of each a simulated variant, after some of the items."""

    items: int
    gains: Array
    losses: Array
    squares: Array | None

    def __add__(self, other: Counts) -> Counts:
        squares = None if self.squares is None or other.squares is None else self.squares + other.squares
        return Counts(self.items + other.items, self.gains + other.gains, self.losses + other.losses, squares)


def margin_of(items: int) -> float:
    return 0.02 if items <= 500 else 0.01


def draw(rng: np.random.Generator, runs: int, items: int, flips: float, loss: float, *, clustered: bool) -> Counts:
    """Draw variants of that true loss; inside clusters changes are correlated by ICC (Dirichlet-multinomial)."""
    p_gain, p_loss = (flips - loss) / 2, (flips + loss) / 2
    if not clustered:
        drawn = rng.multinomial(items, [p_gain, p_loss, 1 - flips], size=runs).astype(float)
        return Counts(items, drawn[:, 0], drawn[:, 1], None)
    groups, found = items // CLUSTER, []
    weight = 1 / ICC - 1
    for start in range(0, runs, max(1, CELLS_AT_ONCE // groups)):
        shape = (min(runs - start, max(1, CELLS_AT_ONCE // groups)), groups)
        parts = [rng.standard_gamma(weight * p, shape) for p in (p_gain, p_loss, 1 - flips)]
        total = parts[0] + parts[1] + parts[2]
        gained = rng.binomial(CLUSTER, np.minimum(1.0, parts[0] / total))
        rest = np.maximum(parts[1] + parts[2], 1e-300)
        lost = rng.binomial(CLUSTER - gained, np.minimum(1.0, parts[1] / rest))
        found.append(np.stack([gained.sum(1), lost.sum(1), ((gained - lost) ** 2).sum(1)]).astype(float))
    gains, losses, squares = np.concatenate(found, axis=1)
    return Counts(groups * CLUSTER, gains, losses, squares)


def p_values(counts: Counts, margin: float) -> Array:
    """The gate's p-value of each variant, as `stats` computes it one by one."""
    gains, losses, n = counts.gains, counts.losses, np.full_like(counts.gains, counts.items)
    df = math.inf
    if counts.squares is not None:
        effect = design_effects(counts)
        gains, losses, n = gains / effect, losses / effect, n / effect
        df = counts.items // CLUSTER - 1.0
    a, b = 2 * n, -gains - losses - (2 * n - gains + losses) * margin
    c = losses * margin * (1 + margin)
    q = (np.sqrt(np.maximum(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    score = (gains - losses + n * margin) / np.sqrt(n * (2 * q - margin * (1 + margin)))
    found: Array = norm.sf(score) if math.isinf(df) else t.sf(score, df)
    return found


def design_effects(counts: Counts) -> Array:
    """`stats.design_effect` of every variant at once."""
    squares = counts.squares if counts.squares is not None else np.zeros(0)
    n, groups = counts.items, counts.items // CLUSTER
    mean = (counts.losses - counts.gains) / n
    between = groups / (groups - 1) * (squares - groups * (CLUSTER * mean) ** 2)
    within = n / (n - 1) * (counts.gains + counts.losses - n * mean**2)
    prior = float(CLUSTER)
    found: Array = np.maximum(1.0, (between + prior * (1 + (CLUSTER - 1) * stats.PRIOR_ICC)) / (within + prior))
    return found


def passes(counts: Counts, margin: float, level: float) -> dict[str, NDArray[np.bool_]]:
    """Which variants each gate lets pass; only ours is told the level, the others know no correction."""
    n, loss, flips = counts.items, (counts.losses - counts.gains) / counts.items, counts.losses + counts.gains
    spread = (ACCURACY * (1 - ACCURACY) + (ACCURACY - loss) * (1 - ACCURACY + loss)) / n
    worse = (counts.losses - counts.gains) / np.sqrt(np.maximum(flips, 1.0))
    return {
        "quantgate": p_values(counts, margin) < level,
        "point estimate": loss < margin,
        "unpaired interval": loss + stats.critical(1 - 2 * ALPHA) * np.sqrt(spread) < margin,
        "McNemar n.s.": worse < stats.critical(1 - ALPHA),
    }


def rates(
    rng: np.random.Generator, campaigns: int, items: int, flips: float, *, clustered: bool
) -> Iterator[tuple[int, int, int, dict[str, float]]]:
    """False-promotion rates by (looks, variants); the same simulated variants form all numbers of variants."""
    margin, runs = margin_of(items), campaigns * max(VARIANTS)
    for looks in LOOKS:
        step = items // looks // (CLUSTER if clustered else 1) * (CLUSTER if clustered else 1)
        level, seen, at_look = nominal_alpha(ALPHA, SHARES[looks]), None, []
        for _ in range(looks):
            fresh = draw(rng, runs, step, flips, margin, clustered=clustered)
            seen = fresh if seen is None else seen + fresh
            at_look.append(seen)
        for variants in VARIANTS:
            promoted = {name: np.zeros(runs // variants, bool) for name in GATES}
            for counts in at_look:
                for name, passed in passes(counts, margin, level / variants).items():
                    promoted[name] |= passed.reshape(-1, variants).any(axis=1)
            yield looks, variants, runs // variants, {name: float(found.mean()) for name, found in promoted.items()}


def check_against_the_gate(rng: np.random.Generator) -> float:
    """The largest difference between these p-values and those of `stats`, over a few variants of each kind."""
    worst, margin = 0.0, 0.02
    plain = draw(rng, 50, 500, 0.05, margin, clustered=False)
    ours = p_values(plain, margin)
    for k in range(50):
        theirs = stats.noninferiority_p(plain.gains[k], plain.losses[k], 500, margin)
        worst = max(worst, abs(theirs - float(ours[k])))
    for _ in range(50):
        sums = rng.choice([-1, 0, 0, 0, 0, 1], size=(40, CLUSTER))
        values, clusters = sums.ravel().astype(float).tolist(), np.repeat(np.arange(40), CLUSTER).tolist()
        gains, losses = values.count(-1.0), values.count(1.0)
        effect = stats.design_effect(values, clusters, 1.0)
        theirs = stats.noninferiority_p(gains / effect, losses / effect, 200 / effect, margin, 39.0)
        squares = np.array([float((sums.sum(axis=1) ** 2).sum())])
        one = Counts(200, np.array([float(gains)]), np.array([float(losses)]), squares)
        worst = max(worst, abs(theirs - float(p_values(one, margin)[0])))
    return worst


def power_gaps(rng: np.random.Generator, runs: int, sizes: Sequence[int]) -> Iterator[tuple[int, float, float, float]]:
    """Power of lossless variants against the formula that plans: (items, flips, simulated, promised)."""
    for items, flips in itertools.product(sizes, FLIPS):
        counts = draw(rng, runs, items, flips, 0.0, clustered=False)
        simulated = float((p_values(counts, margin_of(items)) < ALPHA).mean())
        yield items, flips, simulated, stats.power_of(items, flips, margin_of(items), ALPHA)


def main() -> None:
    """Simulate, print both tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="200 and 500 items, a tenth of the campaigns")
    given = parser.parse_args()
    sizes = ITEMS[:2] if given.quick else ITEMS
    campaigns = 400 if given.quick else 4000
    rng = np.random.default_rng(SEED)
    difference = check_against_the_gate(rng)
    if given.quick:
        print("quick: a smaller sample, wide intervals")
    print(f"{'items':>5} {'flips':>5} {'clusters':>8} {'looks':>5} {'variants':>8}  {'quantgate [95%]':<22}"
          + "".join(f"{name:>19}" for name in GATES[1:]))  # fmt: skip
    worst, blamed, rows, others = 0.0, 0, 0, dict.fromkeys(GATES[1:], 0.0)
    for items, flips, clustered in itertools.product(sizes, FLIPS, (False, True)):
        for looks, variants, count, found in rates(rng, campaigns, items, flips, clustered=clustered):
            rate = found["quantgate"]
            low, high = stats.wilson(rate * count, count, 0.95)
            beside = "".join(f"{found[name]:>19.1%}" for name in GATES[1:])
            kind = f"{CLUSTER} a doc" if clustered else "-"
            print(f"{items:>5} {flips:>5.0%} {kind:>8} {looks:>5} {variants:>8}  {rate:>6.2%} "
                  f"[{low:.2%}, {high:.2%}]{beside}")  # fmt: skip
            worst, rows = max(worst, rate), rows + 1
            blamed += rate > ALPHA + SURE * math.sqrt(ALPHA * (1 - ALPHA) / count)
            others = {name: max(others[name], found[name]) for name in others}
    print(f"\n{'items':>5} {'flips':>5} {'power':>8} {'promised':>8}")
    gaps = []
    for items, flips, simulated, promised in power_gaps(rng, campaigns * 10, sizes):
        print(f"{items:>5} {flips:>5.0%} {simulated:>8.1%} {promised:>8.1%}")
        gaps.append(abs(simulated - promised))
    conclude(
        "gate_error_rates",
        conditions(
            ("numpy", "scipy"), campaigns_of_12_variants=campaigns, seed=SEED, icc=ICC, items_a_cluster=CLUSTER,
            rows=rows, quick=given.quick,
        ),
        {"largest_rate": worst, "largest_rate_of_others": others, "largest_power_gap": max(gaps),
         "p_value_difference": difference},
        {
            "rows whose rate is above 5% beyond Monte-Carlo error": (float(blamed), "<=", 0.0),
            "largest gap between power and its formula": (max(gaps), "<=", 0.03),
            "largest difference from the gate's own p-values": (difference, "<=", 1e-9),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
