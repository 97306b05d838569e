"""The state of a control plane is plain data in small groups, and each function writes to few of them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

from support.written_groups import writers

from chaoskit.coordinator import state
from chaoskit.coordinator.state import PlaneState

PACKAGE = Path(state.__file__).parent
FIELDS_MAX = 15
GROUPS_MAX = 2
GROUPS = {field.name for field in fields(PlaneState)} - {"config", "policies", "limits"}


def test_each_group_is_small() -> None:
    groups = [
        group for group in vars(state).values() if isinstance(group, type) and is_dataclass(group)
    ]
    assert PlaneState in groups
    for group in groups:
        assert len(fields(group)) <= FIELDS_MAX, group.__name__


def test_each_function_writes_to_two_groups_at_most() -> None:
    written = {
        f"{path.name}:{name}": groups
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, groups in writers(path.read_text(), "state", GROUPS).items()
    }
    assert written["on_generation.py:formed"] == {"forming"}, "the check sees variables"
    assert not {name: groups for name, groups in written.items() if len(groups) > GROUPS_MAX}
