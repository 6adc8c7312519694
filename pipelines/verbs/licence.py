"""What a campaign's base may be used under, said before a minute is spent on it."""

from __future__ import annotations

import sys

from pipelines.campaign import Campaign
from pipelines.decide import licences


def warn(campaign: Campaign) -> str:
    """Say on stderr that nothing made from this base could be promoted, and why; give what was said, "" where it can.

    What a statement overrules is said too.
    """
    base = campaign.base.licence.told
    refused = licences.refusal(base, campaign.config.gate.constraints.licences)
    if refused:
        print(f"warning: every candidate will be vetoed: {refused}", file=sys.stderr)
    elif base["licence note"]:
        print(f"warning: checkpoint.licence={base['licence']} is stated, but {base['licence note']}", file=sys.stderr)
    return refused
