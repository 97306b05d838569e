"""Fault injection for distributed PyTorch training, and a training runtime that survives it.

These names are the public API, with the modules ``chaoskit.faults`` (also named ``faults``),
``chaoskit.faults.strategies``, ``chaoskit.checkpoint`` and ``chaoskit.data``. Everything else may
change in any version. A name is imported when it is first used: most need neither torch nor pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaoskit.config import BatchScaling, CheckpointTier, RunConfig
    from chaoskit.elastic.client import RequestReply, RunClient, WorldState
    from chaoskit.elastic.settings import ElasticPolicy
    from chaoskit.errors import BadInput, ChaoskitError, HarnessError
    from chaoskit.experiment.directory import judge_directory
    from chaoskit.experiment.harness import Harness
    from chaoskit.interface import Trainer
    from chaoskit.journal import Record
    from chaoskit.launcher.launch import LaunchResult, launch
    from chaoskit.logrule import LogRule
    from chaoskit.pytest_plugin import Chaos, VerdictError
    from chaoskit.report.store import read_outcomes
    from chaoskit.rules.replay import check_log_rules
    from chaoskit.runlog.outcome import Outcome, Recovery
    from chaoskit.runtime.step.callbacks import Preemption, RankLost, Resize
    from chaoskit.runtime.step.shardwork import Shard
    from chaoskit.runtime.step.transaction import Transaction
    from chaoskit.stacks.patterns import LogPatterns
    from chaoskit.vocabulary import Verdict

#: Public name -> the module that defines it.
_HOMES = {
    # what a training script uses
    "Trainer": "interface",
    "Transaction": "runtime.step.transaction",
    "Shard": "runtime.step.shardwork",
    "Resize": "runtime.step.callbacks",
    "Preemption": "runtime.step.callbacks",
    "RankLost": "runtime.step.callbacks",
    # settings
    "RunConfig": "config",
    "CheckpointTier": "config",
    "BatchScaling": "config",
    "ElasticPolicy": "elastic.settings",
    "LogRule": "logrule",
    "LogPatterns": "stacks.patterns",
    # train, and ask a job that trains
    "launch": "launcher.launch",
    "LaunchResult": "launcher.launch",
    "RunClient": "elastic.client",
    "RequestReply": "elastic.client",
    "WorldState": "elastic.client",
    # test
    "Chaos": "pytest_plugin",
    "Harness": "experiment.harness",
    "judge_directory": "experiment.directory",
    "Outcome": "runlog.outcome",
    "Recovery": "runlog.outcome",
    "Record": "journal",
    "Verdict": "vocabulary",
    "VerdictError": "pytest_plugin",
    "read_outcomes": "report.store",
    "check_log_rules": "rules.replay",
    # errors
    "ChaoskitError": "errors",
    "BadInput": "errors",
    "HarnessError": "errors",
}

__all__ = [
    "BadInput",
    "BatchScaling",
    "Chaos",
    "ChaoskitError",
    "CheckpointTier",
    "ElasticPolicy",
    "Harness",
    "HarnessError",
    "LaunchResult",
    "LogPatterns",
    "LogRule",
    "Outcome",
    "Preemption",
    "RankLost",
    "Record",
    "Recovery",
    "RequestReply",
    "Resize",
    "RunClient",
    "RunConfig",
    "Shard",
    "Trainer",
    "Transaction",
    "Verdict",
    "VerdictError",
    "WorldState",
    "__version__",
    "check_log_rules",
    "judge_directory",
    "launch",
    "read_outcomes",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("chaoskit")
    if name == "faults":
        return import_module(f"{__name__}.faults")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return __all__
