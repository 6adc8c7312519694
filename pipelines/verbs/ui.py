"""The verb that shows what was recorded: ui."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipelines.campaign import CampaignConfig
from pipelines.cli import Answer
from pipelines.compose import compose
from pipelines.config import parse
from pipelines.track.connection import absolute_uri


def ui(args: argparse.Namespace) -> Answer:
    """Serve MLflow until Ctrl-C; a browser is opened where one would be seen, or as told."""
    from pipelines.track.ui import desktop, serve_ui

    directory = Path(args.config_dir).resolve() if args.config_dir else None
    config = parse(CampaignConfig, compose(args.overrides, directory))
    named = any(o.lstrip("+").startswith(("campaign=", "experiment=")) for o in args.overrides)
    link = serve_ui(
        absolute_uri(config.tracking.uri),
        args.port,
        campaign=config.campaign if named else "",
        open_browser=desktop() if args.browser is None else args.browser,
    )
    return Answer(0, {"link": link})
