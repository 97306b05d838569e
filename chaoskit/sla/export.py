"""Promises as alerts on a running training: rules of Prometheus over the metrics that a launch serves."""

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
#: Upper bounds of its buckets: what it counts is known at these limits, and between them it is not.
BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_MATCHERS = re.compile(r'\w+(=|!=|=~|!~)"[^"\n]*"(,\s*\w+(=|!=|=~|!~)"[^"\n]*")*', re.ASCII)


def prometheus_rules(slas: Sequence[Sla], labels: str = "") -> tuple[dict[str, Any], list[str]]:
    """A PrometheusRule, and a line for each promise that it leaves out.

    Args:
        labels: matchers of the training that is meant, such as ``job="pretraining"``.

    Raises:
        BadInput: if they are none.
    """
    if labels and not _MATCHERS.fullmatch(labels):
        raise BadInput("labels", labels, 'write matchers of Prometheus, such as job="pretraining"')
    rules, left_out = [], []
    for sla in slas:
        for line in (*sla.always, *sla.objectives):
            if reason := _why_not(line, sla):
                left_out.append(f"{sla.name}: {line.text}: left out: {reason}")
            else:
                rules.append(_rule(line, sla, labels))
        left_out += [
            f"{sla.name}: regression of {name}: left out: an alert knows no earlier runs"
            for name in sla.regression
        ]
    digest = _digest(f"{labels}{[sla.name for sla in slas]}")
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"chaoskit-sla-{digest}"},
        "spec": {"groups": [{"name": f"chaoskit-sla-{digest}", "rules": rules}]},
    }, left_out


def _why_not(line: Condition, sla: Sla) -> str:
    """The reason for which no metric says the same as a line; "" if one does."""
    if line.number != RECOVERY or line.divisor:
        return "a launch serves no metric that says it of each recovery"
    if sla.window.unit == "run":
        return "a window of runs has no length in time"
    if line.limit not in BOUNDS_S:
        return f"recoveries are counted up to {', '.join(f'{bound:g}' for bound in BOUNDS_S)} s"
    return ""


def _rule(line: Condition, sla: Sla, labels: str) -> dict[str, Any]:
    """An alert while fewer recoveries than promised were within the limit, or any was not where it holds always."""
    matched, length = (f"{labels}," if labels else ""), f"[{sla.window.count}d]"
    within = f'sum(increase({_METRIC}_bucket{{{matched}le="{line.limit}"}}{length}))'
    everything = f"sum(increase({_METRIC}_count{{{labels}}}{length}))"
    expression = (
        f"{within} / {everything} < {line.share!r}"
        if line.is_objective
        else f"{everything} - {within} > 0.5"
    )
    is_chosen = sla.where != Where()
    where = (
        "; it is about all recoveries of that training, whatever `where` says" if is_chosen else ""
    )
    return {
        "alert": f"ChaoskitSla{_digest(f'{sla.name}{line.text}')}",
        "expr": expression,
        "labels": {
            "severity": "ticket" if line.is_objective else "page",
            "sla": sla.name,
            "line": line.text,
        },
        "annotations": {"summary": f"{sla.name}: {line.text}{where}".replace("{{", "{ {")},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
