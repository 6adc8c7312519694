"""Where and as what a campaign is recorded: the configuration of the track stage and of whoever opens its run."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from pipelines.config import Strict
from pipelines.track.masking import masked, masked_text
from pipelines.track.opening import Opening


class TrackingConfig(Strict):
    """Where campaigns are recorded.

    tracking_uri: secrets in it are masked; who records asks `connection.whole` for the rest.
    experiment and registered_model: the campaign's name where empty.
    campaign_config: the resolved configuration, kept with the run; secrets in it are masked before anything is stored.
    plan_key: the key the decision has if nothing fails; the run that was opened before any work is found by it.
    opening: what was known then; None where there was nothing to do but to record.
    patience_s: how long a server that went away in the middle of a recording is waited for.
    """

    unkeyed: ClassVar[frozenset[str]] = frozenset({"artifact_root", "plan_key", "opening", "timeout_s", "patience_s"})

    tracking_uri: str
    artifact_root: str = ""
    experiment: str = ""
    registered_model: str = ""
    campaign_config: dict[str, Any] = Field(default_factory=dict)
    plan_key: str = ""
    opening: Opening | None = None
    timeout_s: float = Field(default=10.0, gt=0)
    patience_s: float = Field(default=60.0, ge=0)

    @field_validator("campaign_config", mode="before")
    @classmethod
    def _without_secrets(cls, value: object) -> object:
        return masked(value)

    @field_validator("tracking_uri")
    @classmethod
    def _without_password(cls, uri: str) -> str:
        return masked_text(uri)
