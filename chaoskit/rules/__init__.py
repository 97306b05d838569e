"""Log rules: expectations on the log of a job, and actions for lines that break them."""

from __future__ import annotations

from chaoskit.logrule import LogRule
from chaoskit.rules.engine import Fired, RuleVerdict, RuleWatch
from chaoskit.rules.replay import Replay, check_log_rules, replay_log
from chaoskit.rules.rules import load_rules, parse_rules, read_rules

__all__ = [
    "Fired",
    "LogRule",
    "Replay",
    "RuleVerdict",
    "RuleWatch",
    "check_log_rules",
    "load_rules",
    "parse_rules",
    "read_rules",
    "replay_log",
]
