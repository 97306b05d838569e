"""Log rules as in HyperPod's ``logMonitoringConfiguration``, with some additions: plain data.

Names, types and meaning are those of HyperPod's training operator: see its documentation,
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-eks-operator-usage.html, and the class
``LogEvaluator`` of ``hyperpod-elastic-agent``. A pattern is matched from the start of a line, and
the first group is the number. The rules are a part of a run's configuration.

-> ``rules/engine.py``: how a rule is evaluated. ``rules/rules.py``: how it is read and checked.
``coordinator/handlers/on_rule_fired.py``: what follows when it fires.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Operator = Literal["gt", "gteq", "lt", "lteq", "eq"]
Action = Literal["restart-process", "replace-node", "alert"]

#: Field -> its name in files, if that differs.
NAMES = {
    "pattern": "logPattern",
    "start_cutoff_s": "expectedStartCutOffInSeconds",
    "frequency_s": "expectedRecurringFrequencyInSeconds",
    "threshold": "metricThreshold",
    "data_points": "metricEvaluationDataPoints",
    "stop_pattern": "stopPattern",
    "fault_on_match": "faultOnMatch",
}


class LogRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename=NAMES):
    """A rule on one kind of log line: its pattern, and how often it must come.

    Files use the names of HyperPod for the fields.

    Args:
        name: name under which verdicts are reported; unique in a list.
        pattern: ``logPattern``, a regular expression, matched from the start of the line. Its only
            outermost group is the metric; with none or several there is no metric. A metric that is
            NaN or infinite is ``not-a-number``, whatever the threshold.
        start_cutoff_s: ``expectedStartCutOffInSeconds``: no match for longer than this after the
            start is ``hanging``; None for no limit, like the next one.
        frequency_s: ``expectedRecurringFrequencyInSeconds``: no match for longer than this after a
            match is ``hanging``.
        threshold, operator: ``metricThreshold``: a metric is too slow (or too high, too low) if
            ``metric operator threshold`` is true. Give both or neither. HyperPod takes whole
            numbers, chaoskit any number.
        data_points: ``metricEvaluationDataPoints``: this many such metrics in a row are ``slow``.
        stop_pattern: ``stopPattern``: a line that ends the watch.
        fault_on_match: ``faultOnMatch``: the first match is ``faulted``, and the first one in each
            later generation of the job.
        action: the action when the rule fires; an addition of chaoskit.
    """

    name: str
    pattern: str
    start_cutoff_s: float | None = None
    frequency_s: float | None = None
    threshold: float | None = None
    operator: Operator | None = None
    data_points: int = 1
    stop_pattern: str = ""
    fault_on_match: bool = False
    action: Action = "restart-process"
