"""The state of a membership is plain data in small groups, and each function writes to few of them."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

from support.written_groups import writers

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership import state
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.job import JobSpec

PACKAGE = Path(state.__file__).parent
FIELDS_MAX = 15
GROUPS_MAX = 2
_RULES = {"config", "policies", "limits"}
GROUPS = set(vars(Membership(RunConfig(job=JobSpec("job.py"), nodes=1)))) - _RULES


def test_each_group_is_small() -> None:
    for name in (
        "RunStatus",
        "Failures",
        "Generations",
        "Nodes",
        "TargetWorld",
        "Training",
        "LiveWorkers",
    ):
        assert len(fields(getattr(state, name))) <= FIELDS_MAX, name
    search = vars(Membership(RunConfig(job=JobSpec("job.py"), nodes=1)).search)
    assert len(search) <= FIELDS_MAX, "the search for copies"


def test_each_function_writes_to_two_groups_at_most() -> None:
    written = {
        f"{path.name}:{name}": groups
        for path in sorted(PACKAGE.glob("*.py"))
        for name, groups in writers(path.read_text(), "membership", GROUPS).items()
    }
    assert written["worker_placement.py:start_missing"] == {"known_nodes", "workers"}, (
        "the check sees variables"
    )
    assert written["apply.py:_readmitted"] == {"known_nodes"}, "the check sees changed sets"
    assert not {name: groups for name, groups in written.items() if len(groups) > GROUPS_MAX}


def test_no_other_package_reads_or_writes_a_group() -> None:
    package = PACKAGE.parent
    for path in sorted(package.rglob("*.py")):
        if path.is_relative_to(PACKAGE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(
                    value=ast.Attribute(attr="_membership" | "membership"), attr=name
                ):
                    assert name not in GROUPS, f"{path.relative_to(package)}:{node.lineno}: {name}"
                case ast.Attribute(value=ast.Name(id="membership"), attr=name):
                    assert name not in GROUPS, f"{path.relative_to(package)}:{node.lineno}: {name}"
