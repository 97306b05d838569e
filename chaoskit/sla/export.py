"""The same promises as alerts on a running training: rules of Prometheus over the metrics that a launch serves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from chaoskit.sla.language import Condition
from chaoskit.sla.promises import Sla, Window

#: Numbers of runs, and the metrics of ``chaoskit launch --metrics`` that say the same of a training that goes on.
_HISTOGRAMS = {"recovery": "chaoskit_time_to_recover_seconds", "step": "chaoskit_step_seconds"}
_GAUGES = {"goodput": "chaoskit_recent_goodput_ratio", "ettr": "chaoskit_recent_ettr_ratio"}
_RANGE_RUNS = "30d"  # a window of runs has no length in time


def prometheus_rules(slas: Sequence[Sla], labels: str = "") -> tuple[dict[str, Any], list[str]]:
    """A PrometheusRule, and a line for each promise that has no metric.

    Args:
        labels: matchers of the training that is meant, such as ``job="pretraining"``.
    """
    rules, left_out = [], []
    for sla in slas:
        for line in (*sla.always, *sla.objectives):
            expression = _expression(line, sla.window, labels)
            if expression is None:
                left_out.append(f"{sla.name}: {line.text}: a launch serves no metric that says it")
                continue
            rules.append(
                {
                    "alert": _name(sla, line),
                    "expr": expression,
                    "labels": {"severity": "page" if not line.is_objective else "ticket"},
                    "annotations": {"summary": f"{sla.name}: {line.text}"},
                }
            )
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "chaoskit-sla"},
        "spec": {"groups": [{"name": "chaoskit-sla", "rules": rules}]},
    }, left_out


def _expression(line: Condition, window: Window, labels: str) -> str | None:
    """What is true while a line is broken; None where no metric says it."""
    matched = f"{{{labels}}}" if labels else ""
    length = f"{window.count}d" if window.unit == "night" else _RANGE_RUNS
    opposite = {"<=": ">", ">=": "<", "==": "!="}[line.relation]
    if line.below:
        return None
    if (histogram := _HISTOGRAMS.get(line.number)) is not None:
        rate = f"sum by (le) (increase({histogram}_bucket{matched}[{length}]))"
        return f"histogram_quantile({line.share:g}, {rate}) {opposite} {line.limit:g}"
    if (gauge := _GAUGES.get(line.number)) is not None:
        return f"quantile_over_time({1 - line.share:g}, {gauge}{matched}[{length}]) {opposite} {line.limit:g}"
    return None


def _name(sla: Sla, line: Condition) -> str:
    words = re.findall(r"[A-Za-z0-9]+", f"{sla.name} {line.number} {line.share:g}")
    return "Chaoskit" + "".join(word[:1].upper() + word[1:] for word in words)
