"""Export of SLAs as Prometheus alerting rules over the metrics that a launch serves.

-> observe/metrics.py: the exported metrics. sla/judge.py: evaluation on recorded runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from chaoskit.errors import BadInput
from chaoskit.history.record import RECOVERY
from chaoskit.sla.language import Condition
from chaoskit.sla.promises import Sla, Where

_METRIC = "chaoskit_time_to_recover_seconds"
#: Upper bounds of the histogram's buckets in seconds, as observe/histograms.py has them. Only
#: limits with these values can be checked.
BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_MATCHERS = re.compile(r'\w+(=|!=|=~|!~)"[^"\n]*"(,\s*\w+(=|!=|=~|!~)"[^"\n]*")*', re.ASCII)


def prometheus_rules(slas: Sequence[Sla], labels: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return a PrometheusRule, and a line for each promise that it leaves out, with the reason.

    Regressions are always left out. Alerts ignore the selection of runs by ``where``.

    Args:
        labels: matchers that select the training, such as ``job="pretraining"``; "" for all.

    Raises:
        BadInput: if the labels are no matchers.
    """
    if labels and not _MATCHERS.fullmatch(labels):
        raise BadInput("labels", labels, 'write matchers of Prometheus, such as job="pretraining"')
    rules, left_out = [], []
    for sla in slas:
        for line in (*sla.always, *sla.objectives):
            if reason := _left_out_reason(line, sla):
                left_out.append(f"{sla.name}: {line.text}: left out: {reason}")
            else:
                rules.append(_rule(line, sla, labels))
        left_out += [
            f"{sla.name}: regression of {name}: left out: an alert has no earlier runs"
            for name in sla.regression
        ]
    digest = _digest(f"{labels}{[sla.name for sla in slas]}")
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"chaoskit-sla-{digest}"},
        "spec": {"groups": [{"name": f"chaoskit-sla-{digest}", "rules": rules}]},
    }, left_out


def _left_out_reason(line: Condition, sla: Sla) -> str:
    """Return why no metric can express a line; "" if there is one."""
    if line.number != RECOVERY or line.divisor:
        return "a launch serves no metric with this number for each recovery"
    if sla.window.unit == "run":
        return "a window of runs has no length in time"
    if line.limit not in BOUNDS_S:
        bounds = ", ".join(f"{bound:g}" for bound in BOUNDS_S)
        return f"the limit is not a bound of the metric's buckets: {bounds} s"
    return ""


def _rule(line: Condition, sla: Sla, labels: str) -> dict[str, Any]:
    """Return the alert of a line.

    An objective fires while fewer recoveries than promised were within the limit. Other lines fire
    while any recovery was not. No alert fires without recoveries in the window.
    """
    matchers = f"{labels}," if labels else ""
    period = f"[{sla.window.count}d]"
    within = f'sum(increase({_METRIC}_bucket{{{matchers}le="{line.limit}"}}{period}))'
    total = f"sum(increase({_METRIC}_count{{{labels}}}{period}))"
    expression = (
        f"{within} / {total} < {line.share!r}" if line.is_objective else f"{total} - {within} > 0.5"
    )
    has_selection = sla.where != Where()
    ignored_where = (
        "; the alert covers all recoveries of that training and ignores `where`"
        if has_selection
        else ""
    )
    return {
        "alert": f"ChaoskitSla{_digest(f'{sla.name}{line.text}')}",
        "expr": expression,
        "labels": {
            "severity": "ticket" if line.is_objective else "page",
            "sla": sla.name,
            "line": line.text,
        },
        "annotations": {"summary": f"{sla.name}: {line.text}{ignored_where}".replace("{{", "{ {")},
    }


def _digest(text: str) -> str:
    """Return eight hexadecimal digits that identify a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
