"""The page that answers the question: a saved view of MLflow's run list that opens on accuracy against latency.

MLflow keeps shared views in experiment tags whose form is its own affair: all of it is here, none of it is needed.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TAG = "mlflow.sharedViewState."
NOTE, OWN_NOTE = "mlflow.note.content", "quantgate.note"
"""An experiment's description, and what we last wrote there: where they differ, a person wrote it."""
PARAMS = ("method", "scheme")


def state(campaign_key: str, x: str, y: str, metrics: Sequence[str]) -> dict[str, object]:
    """The run list's state: this campaign's variants, their scatter, and parallel coordinates below it."""
    section = f"quantgate-{campaign_key}"
    chart = {"deleted": False, "isGenerated": False, "metricSectionId": section, "runsCountToCompare": 100}
    scatter = chart | {
        "type": "SCATTER",
        "uuid": f"{section}-scatter",
        "xaxis": {"key": x, "type": "METRIC"},
        "yaxis": {"key": y, "type": "METRIC"},
    }
    parallel = chart | {
        "type": "PARALLEL",
        "uuid": f"{section}-parallel",
        "selectedParams": list(PARAMS),
        "selectedMetrics": list(metrics),
        "showAllRuns": True,
    }
    columns = ["attributes.`Source`", "attributes.`Models`", "attributes.`Dataset`"]
    return {
        "searchFilter": variants_of(campaign_key),
        "orderByKey": f"metrics.`{y}`",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "runsHiddenMode": "SHOWALL",
        "runsHidden": [],
        "runsPinned": [],
        "runsExpanded": {},
        "runsVisibilityMap": {},
        "selectedColumns": [
            c
            for c in ("tags.`verdict`", "tags.`pareto`", f"metrics.`{y}`", f"metrics.`{x}`", *columns)
            if c not in columns
        ],
        "compareRunCharts": [scatter, parallel],
        "compareRunSections": [
            {
                "uuid": section,
                "name": "Accuracy against latency",
                "display": True,
                "isReordered": True,
                "deleted": False,
                "isGenerated": False,
                "columns": 1,
                "cardHeight": 460,
            }
        ],
        "isAccordionReordered": True,
        "autoRefreshEnabled": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "viewMaximized": True,
        "runListHidden": False,
    }


def packed(view: dict[str, object]) -> str:
    """A state in the form MLflow stores: deflated, in base64."""
    return "deflate;" + base64.b64encode(zlib.compress(json.dumps(view).encode())).decode()


def variants_of(campaign_key: str) -> str:
    """The search for a campaign's variants."""
    return f"tags.kind = 'variant' and tags.campaign_key = '{campaign_key}'"


def fragment(experiment_id: str, campaign_key: str = "") -> str:
    """The part of a link after the server's address: a saved view's, or without a key that of the plain run list."""
    return _runs(experiment_id, {"viewStateShareKey": campaign_key} if campaign_key else {})


def searched(experiment_id: str, campaign_key: str, metric: str) -> str:
    """The link to the run list of a campaign's variants, highest of a metric first, which needs no saved view.

    Not for the view's own link: MLflow takes no view where a link carries a search. Sorted by a metric, since sorted by
    time it folds runs into their parents.
    """
    order = {"orderByKey": f"metrics.`{metric}`", "orderByAsc": "false"}
    return _runs(experiment_id, {"searchFilter": variants_of(campaign_key), **order})


def note(headline: str, experiment_id: str, run_id: str) -> str:
    """What stands at the head of the experiment's pages: the decision, and the way to the chart with names."""
    where = f"#/experiments/{experiment_id}/runs/{run_id}/artifacts/report.html?workflowType=machine_learning"
    return f"[Report with the named chart]({where}) **{' '.join(headline.split())}**"  # the page shows one line


def describe(client: MlflowClient, experiment_id: str, text: str) -> None:
    """Put a note at the head of an experiment's pages, unless a person's own stands there; nothing hangs on it."""
    from mlflow.exceptions import MlflowException

    try:
        tags = client.get_experiment(experiment_id).tags
        if tags.get(NOTE, "") == tags.get(OWN_NOTE, ""):
            client.set_experiment_tag(experiment_id, OWN_NOTE, text)
            client.set_experiment_tag(experiment_id, NOTE, text)
    except MlflowException:
        return


def _runs(experiment_id: str, asked: dict[str, str]) -> str:
    given = {"workflowType": "machine_learning", **asked, "compareRunsMode": "CHART"}
    return f"#/experiments/{experiment_id}/runs?{urlencode(given, quote_via=quote)}"


def save(
    client: MlflowClient, experiment_id: str, campaign_key: str, name: str, now_ms: int, view: dict[str, object]
) -> str:
    """Store a view under the campaign's key; give the link to it, or to the search for the same runs where that
    fails."""
    from mlflow.exceptions import MlflowException

    entry = {"name": name, "createdAt": now_ms, "updatedAt": now_ms, "state": packed(view)}
    try:
        client.set_experiment_tag(experiment_id, TAG + campaign_key, json.dumps(entry))
    except MlflowException:
        return searched(
            experiment_id, campaign_key, str(view.get("orderByKey", "")).removeprefix("metrics.").strip("`")
        )
    return fragment(experiment_id, campaign_key)
