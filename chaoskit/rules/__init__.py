"""Log rules: what a job's log must show, and what is to be done when it does not."""

from __future__ import annotations

from chaoskit.logrule import LogRule
from chaoskit.rules.engine import Fired, RuleVerdict, Watch
from chaoskit.rules.replay import Replay, check_log_rules, replay_log
from chaoskit.rules.rules import load_rules, parse_rules, read_rules

__all__ = [
    "Fired",
    "LogRule",
    "Replay",
    "RuleVerdict",
    "Watch",
    "check_log_rules",
    "load_rules",
    "parse_rules",
    "read_rules",
    "replay_log",
]
