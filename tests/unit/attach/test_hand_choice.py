"""Each fault of the catalogue has hands in a job that already runs, or a remedy; the page says which."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from chaoskit.attach.guards.hand_choice import (
    API,
    FAULT_HANDS,
    MACHINE,
    actions_of,
    hand_of,
    strikes_machine,
)
from chaoskit.attach.hands.hand_container import EXEC, HandImage, HandMeans
from chaoskit.errors import BadInput
from chaoskit.faults import (
    CATALOGUE,
    Bandwidth,
    Cut,
    DeletePod,
    Fault,
    Hang,
    Kill,
    LimitCpu,
    LoseMachine,
    LoseNode,
)
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.traffic import Block
from chaoskit.substrate.kubernetes.pods.actions import ContainerCrash, PodDeletion

PAGE = Path(__file__).parents[3] / "docs" / "attach.md"
_NAME = re.compile(r'`(\w+)(?:\(how="(\w+)"\))?`')


def forms() -> Iterator[tuple[str, Fault]]:
    """Yield each form of each fault, with the name by which the page calls it."""
    for kind in CATALOGUE:
        for form in kind.forms:
            fault = kind(**{**kind.sample, **form})
            yield f"{kind.__name__}.{form['how']}" if "how" in form else kind.__name__, fault


def answer(fault: Fault) -> str:
    """Return the hands of a fault as the page writes them, or "" if it is refused.

    The page has those by exec only for faults that nothing else can do.
    """
    hands, refusal = frozenset[str](), None
    for means in (HandMeans(), HandMeans(by_exec=True)):
        with contextlib.suppress(BadInput):
            hands = hands or hand_of(fault, means)
    try:
        hand_of(fault)
    except BadInput as error:
        refusal = error
    if refusal is not None and not hands:
        assert (refusal.field, refusal.value) == ("faults", str(fault))
        assert "\n" not in refusal.remedy
        assert refusal.remedy.split()[0] in ("use", "run", "lower")
        return ""
    assert hands
    assert hands <= {*FAULT_HANDS}
    return ", ".join(sorted(hands))


def page_rows() -> dict[str, str]:
    """Return the hands of each fault by the page: name, or name and form -> hands; "" if refused."""
    rows = dict[str, str]()
    text = PAGE.read_text().split("## Which faults are possible")[1].split("## Guard rails")[0]
    possible, refused = text.split("Other faults are refused")
    for part, is_refused in ((possible, False), (refused, True)):
        for line in part.splitlines():
            if line.startswith("| `"):
                _, names, hands, _ = line.split("|")
                for name, how in _NAME.findall(names):
                    key = f"{name}.{how}" if how else name
                    assert key not in rows
                    rows[key] = "" if is_refused else hands.strip()
    return rows


def test_the_page_has_the_hands_of_each_form_of_each_fault() -> None:
    rows = page_rows()
    named = set[str]()
    for name, fault in forms():
        key = name if name in rows else fault.kind
        assert rows[key] == answer(fault), name
        named.add(key)
    assert named == set(rows)


def test_facts_of_the_classes_decide() -> None:
    assert hand_of(Kill(rank=1, at_step=2)) == {"processes"}
    assert hand_of(Cut(rank=1, at_step=2)) == {"network"}
    lost = LoseNode(rank=1, at_step=2)
    assert hand_of(lost) == {API, "network", "processes"}
    assert actions_of(lost) == {Block, ContainerCrash, PodDeletion}
    assert actions_of(Cut(rank=1, at_step=2)) == {Block}
    assert hand_of(DeletePod(rank=1, at_step=2)) == {API}
    assert hand_of(LoseMachine(rank=1, at_step=2)) == {MACHINE}
    assert strikes_machine(LoseMachine(rank=1, at_step=2))
    assert not strikes_machine(Kill(rank=1, at_step=2))
    with pytest.raises(BadInput, match="inside a process"):
        hand_of(Hang(rank=1, at_step=2, how="gil"))
    with pytest.raises(BadInput, match="all that a pod sends"):
        hand_of(Bandwidth(rank=1, at_step=2, per_peer=True))


def test_a_hand_by_exec_acts_on_processes_and_never_on_the_network() -> None:
    by_exec = HandMeans(by_exec=True)
    assert hand_of(Kill(rank=1, at_step=2), by_exec) == {EXEC}
    assert hand_of(DeletePod(rank=1, at_step=2), by_exec) == {API}
    with pytest.raises(BadInput, match="name an image of hands"):
        hand_of(Cut(rank=1, at_step=2), by_exec)
    assert hand_of(LimitCpu(rank=1, at_step=2), by_exec) == {EXEC}
    with pytest.raises(BadInput, match="use exec_hands=True"):
        hand_of(LimitCpu(rank=1, at_step=2))
    both = HandMeans(HandImage("registry/hand:1"), by_exec=True)
    assert hand_of(Cut(rank=1, at_step=2), both) == {"network"}
    assert hand_of(Kill(rank=1, at_step=2), both) == {EXEC}


class ColdPlate(Action, frozen=True):
    """An action that no hand carries out."""


@dataclass(frozen=True, kw_only=True)
class OwnFault(Fault):
    """A fault of a user."""

    from_outside: ClassVar[bool] = True
    needs: ClassVar[Any] = (ColdPlate,)


def test_a_fault_of_a_user_is_refused_for_an_action_that_no_hand_has() -> None:
    with pytest.raises(BadInput, match="no hand carries out ColdPlate"):
        hand_of(OwnFault(rank=1, at_step=2))
