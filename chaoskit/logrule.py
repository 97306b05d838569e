"""Log rules as HyperPod's ``logMonitoringConfiguration`` has them, with additions of ours: plain data.

Names, types and meaning are those of the training operator, as its documentation and its agent have them:
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-eks-operator-usage.html and the class ``LogEvaluator`` of
``hyperpod-elastic-agent``: a pattern is matched from the start of a line, and the first group is the number. What they
mean is in :mod:`chaoskit.rules`; here they are a part of a run's configuration.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Operator = Literal["gt", "gteq", "lt", "lteq", "eq"]
Action = Literal["restart-process", "replace-node", "alert"]

#: What a field is called in files, where that differs.
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
    """What one kind of line must look like, and how often it must come. In files the names are HyperPod's.

    Args:
        name: under which verdicts are reported; unique in a list.
        pattern: ``logPattern``, a regular expression, matched from the start of the line. Its one group that lies in
            no other one is the metric.
        start_cutoff_s: ``expectedStartCutOffInSeconds``: no match for longer than this after the start is ``hanging``.
        frequency_s: ``expectedRecurringFrequencyInSeconds``: no match for longer than this after one is ``hanging``.
        threshold, operator: ``metricThreshold``: a metric of which ``metric operator threshold`` is true is too slow
            (or too high, too low). HyperPod takes whole numbers, we any.
        data_points: ``metricEvaluationDataPoints``: so many of them in a row are ``slow``.
        stop_pattern: ``stopPattern``: a line that ends the watch.
        fault_on_match: ``faultOnMatch``: the first match is ``faulted``.
        action: ours: what is to be done when the rule fires.
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
