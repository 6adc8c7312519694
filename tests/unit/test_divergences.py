"""What divergences come to: the engine-loss veto by arithmetic, and how documents, report and MLflow tell them."""

from __future__ import annotations

import math

import pytest
import scipy.stats

from pipelines.config import parse
from pipelines.decide import divergences
from pipelines.decide.divergences import ratio_interval
from pipelines.decide.document import markdown
from pipelines.decide.engineloss import EngineLoss, exceeded
from pipelines.decide.model import Decision, Noise
from pipelines.divergence.figures import Figures, Row
from pipelines.errors import ConfigError
from pipelines.track import wording
from pipelines.track.report import ReportConfig, render
from tests.decisions import decision


def figures(kl: float, *, exact: bool = True, **changes: object) -> Figures:
    """Figures around a mean KL, over four windows."""
    given: dict[str, object] = {
        "positions": 2044, "windows": 4, "exact": exact, "kl_mean": kl, "kl_median": kl / 2, "kl_p99": kl * 9,
        "kl_p999": kl * 40, "same_top": 0.875, "dp_mean": -0.0021, "dp_rms": 0.043, "perplexity_reference": 20.0,
        "perplexity": 21.0, "log_ratio": math.log(1.05), "log_ratio_se": 0.01,
    }  # fmt: skip
    return Figures.model_validate(given | changes)


def row(
    kl: float, loss: str = "engine", text: str = "held_out", arithmetic: str | None = "float32", **more: bool
) -> Row:
    """One comparison."""
    kind = arithmetic if loss == "engine" else None
    given = {"loss": loss, "text": text, "between": "a and b", "arithmetic": kind, "figures": figures(kl, **more)}
    return Row.model_validate(given)


@pytest.mark.parametrize(
    ("arithmetic", "correct", "faulty"),
    [
        ("float32", 3.7e-11, 3.7e-6),
        ("half", 8.4e-4, 1.5e-2),
        ("int8_activations", 6.7e-3, 1.3e-1),
        ("rounded_activations", 2.4e-2, 3.6e-1),
        (None, 8.4e-4, 1.5e-2),
    ],
)
def test_engines_are_held_to_the_floor_of_their_arithmetic(arithmetic: str, correct: float, faulty: float) -> None:
    """What correct engines were measured at passes; a float16 engine sold as float32, or a table rounded in silence,
    does not."""
    assert [] == list(exceeded([row(correct, arithmetic=arithmetic)], EngineLoss()))
    (told,) = exceeded([row(correct, arithmetic=arithmetic), row(faulty, arithmetic=arithmetic)], EngineLoss())
    assert f"engine loss: mean KL of {faulty:.2g} to its own checkpoint on held-out text" in told


def test_only_the_engines_own_loss_is_held_to_the_floor() -> None:
    """A checkpoint far from the base is a matter for margins, not a fault of the engine."""
    assert [] == list(exceeded([row(0.5, "quantization"), row(0.5, "total")], EngineLoss()))


def test_a_bound_from_rounded_numbers_is_not_held_to_what_they_cannot_tell() -> None:
    """Log-probabilities sent as float32 resolve 1e-6: below it nothing is said, above it the bound is evidence."""
    rules = EngineLoss()
    assert [] == list(exceeded([row(5e-7, exact=False)], rules))
    (told,) = exceeded([row(5e-6, text="prompts", exact=False)], rules)
    assert "mean KL of at least 5e-06 to its own checkpoint on eval prompts" in told


def test_a_limit_below_its_floor_is_refused() -> None:
    """It would veto correct engines."""
    with pytest.raises(ConfigError, match="must be above the floor"):
        parse(EngineLoss, {"float32": {"floor": 1e-4, "limit": 1e-5, "source": "a guess"}})


def test_the_interval_of_a_perplexity_ratio_is_ts() -> None:
    """Four windows: three degrees of freedom, on the logarithm; one window has none."""
    half = scipy.stats.t.ppf(0.975, 3) * 0.01
    found = ratio_interval(figures(0.1))
    assert found == pytest.approx((1.05 * math.exp(-half), 1.05 * math.exp(half)))
    assert None is ratio_interval(figures(0.1, log_ratio_se=None, windows=1))


def shown() -> Decision:
    """The made-up decision with divergences of its winner and an A/A run."""
    made = decision()
    rows = (
        row(0.031, "quantization"),
        row(2.8e-11),
        row(0.0298, "total", exact=False),
        row(0.04, "quantization", "prompts"),
    )
    candidates = [c.model_copy(update={"divergences": rows}) if c.label == made.winner else c for c in made.candidates]
    noise = Noise(eval_set="support_intent", items=48, gains=0, losses=1, answers_changed=3, mean_change=-1 / 48)
    gate = made.gate | {"speed": {"profile": "closed-4"}}
    return made.model_copy(update={"candidates": tuple(candidates), "noise": (noise,), "gate": gate})


def test_the_document_tells_the_three_losses_and_the_noise() -> None:
    """One line for each text, lower bounds marked, every figure below, and A/A flips beside those of each set."""
    text = markdown(shown())
    assert "| gptq_w4a16_g64 | held-out text | 0.031 | 2.8e-11 | ≥ 0.0298 | 4e-11 | float32 |" in text
    assert "| gptq_w4a16_g64 | eval prompts | 0.04 | – | – |  |  |" in text
    assert "| 87.5% | -0.0021 | 0.0430 | 1.05 (1.017 to 1.084) | 2044 | 4 | a and b |" in text
    lines = [line for line in text.splitlines() if line.startswith("| gptq_w4a16_g64 | support_intent ")]
    assert "| 1 of 48 |" in lines[0]
    assert not any("1 of 48" in line for line in text.splitlines() if "ticket_json" in line or "billing" in line)
    assert "None was measured." in markdown(shown().model_copy(update={"candidates": decision().candidates}))


def test_the_report_shows_the_same_table() -> None:
    """And nothing where nothing was measured."""
    page = render(shown(), ReportConfig())[0].replace("<br><small>", " ")  # an interval stands below its figure
    for cell in ("<h2>Divergence</h2>", "≥ 0.0298", "2.8e-11", "1.05 (1.017 to 1.084)", "A/A 1 of 48"):
        assert cell in page
    assert "<h2>Divergence</h2>" not in render(decision(), ReportConfig())[0]


def test_metrics_carry_loss_text_and_figure_in_their_names() -> None:
    """A lower bound never stands under the name of the exact figure."""
    found = wording.metrics(next(c for c in shown().candidates if c.divergences))
    assert (0.031, 2.8e-11) == (
        found["divergence/quantization/held_out/kl_mean"], found["divergence/engine/held_out/kl_mean"]
    )  # fmt: skip
    assert 0.0298 == found["divergence/total/held_out/kl_at_least_mean"]
    assert "divergence/total/held_out/kl_mean" not in found
    assert found["divergence/quantization/prompts/perplexity_log_ratio"] == pytest.approx(math.log(1.05))


def test_every_loss_has_a_formula() -> None:
    """Whoever reads the table finds what it means."""
    assert set(divergences.LOSSES.values()) < set(divergences.FORMULAS)
