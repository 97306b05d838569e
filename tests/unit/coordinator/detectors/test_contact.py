"""Tests of the contact to nodes: silent ones, and those that may train on unseen."""

from __future__ import annotations

from collections.abc import Collection

from chaoskit.coordinator.detectors.contact import RETURN_S, Contact
from chaoskit.coordinator.membership.policies import may_give_up
from chaoskit.wire.lease import Leases

INTERVAL_S, BEATS, FENCE_S, SLOW_S = 0.05, 3, 10.0, 1.0
LEASE_S = Leases(INTERVAL_S, BEATS).lease_s
FOUR = ("node0", "node1", "node2", "node3")


class Clock:
    """Feeds a contact with the beats of some nodes, and asks it as often as a coordinator does."""

    def __init__(self, nodes: Collection[str] = FOUR) -> None:
        self.now_s = 100.0
        self.contact = Contact(INTERVAL_S, BEATS, FENCE_S, SLOW_S, may_give_up)
        self.contact.listen((), self.now_s)
        for node in nodes:
            self.contact.beat(node, self.now_s)

    def run(
        self,
        seconds: float,
        heard: Collection[str],
        keepers: Collection[str],
        beat_ms: int = 50,
        slow: Collection[str] = (),
    ) -> list[tuple[str, str]]:
        """Run until a node is given up or the time has passed.

        The kernels of ``slow`` nodes acknowledge.
        """
        began_s, until_s = self.now_s, self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.01
            if round((self.now_s - began_s) * 1000) % beat_ms == 0:
                for node in heard:
                    self.contact.beat(node, self.now_s)
            self.contact.listen(
                keepers, self.now_s, [node for node in self.contact.ask(self.now_s) if node in slow]
            )
            if lost := self.contact.lost(keepers, self.now_s):
                return lost
        return []


def test_a_silent_node_is_given_up_when_its_lease_has_run_out() -> None:
    clock = Clock()
    began_s = clock.now_s
    assert clock.run(1.0, heard=FOUR[:3], keepers=FOUR) == [("node3", "silent for 3 beats")]
    assert LEASE_S <= clock.now_s - began_s <= LEASE_S + 0.05


def test_a_slow_node_is_given_up_later_and_says_why() -> None:
    """Its kernel acknowledges, so its ranks train.

    They get no orders, so it is not kept for ever.
    """
    clock = Clock()
    began_s = clock.now_s
    lost = clock.run(3.0, heard=FOUR[:3], keepers=FOUR, slow=FOUR[3:])
    assert lost == [("node3", "no report for 1 s, although the kernel of the node acknowledges")]
    assert SLOW_S <= clock.now_s - began_s <= SLOW_S + 0.05


def test_slow_nodes_are_no_sign_that_we_are_cut_off() -> None:
    """The silent one is given up as soon as a node that has the state is in contact."""
    clock = Clock(nodes=FOUR[:2])
    assert clock.run(0.5, heard=(), keepers=FOUR[:2], slow=("node0",)) == []
    began_s = clock.now_s
    assert clock.run(1.0, heard=("node0",), keepers=FOUR[:2]) == [("node1", "silent for 3 beats")]
    assert clock.now_s - began_s <= 2 * INTERVAL_S


def test_a_slow_node_is_not_steady() -> None:
    """The last report on its ranks is old; after its return it may have more to report."""
    clock = Clock()
    clock.run(2.0, heard=FOUR, keepers=FOUR)
    assert clock.contact.is_steady("node3", clock.now_s)
    clock.run(0.5, heard=FOUR[:3], keepers=FOUR, slow=FOUR[3:])
    assert not clock.contact.is_steady("node3", clock.now_s)
    clock.run(RETURN_S - 0.1, heard=FOUR, keepers=FOUR)
    assert not clock.contact.is_steady("node3", clock.now_s)
    clock.run(0.3, heard=FOUR, keepers=FOUR)
    assert clock.contact.is_steady("node3", clock.now_s)


def test_a_slow_node_that_alone_has_the_state_is_waited_for_as_long_as_a_silent_one() -> None:
    clock = Clock(nodes=("node0", "node1"))
    assert clock.run(FENCE_S - 1, heard=("node1",), keepers=("node0",), slow=("node0",)) == []
    assert clock.run(3.0, heard=("node1",), keepers=("node0",)) != []


def test_reports_that_come_late_on_a_starved_machine_keep_no_silent_node() -> None:
    """No node is in contact at times between their reports.

    This is no cut: no lease has run out.
    """
    clock, began_s = Clock(), 100.0
    assert clock.run(0.06, heard=FOUR[:2], keepers=FOUR, beat_ms=60) == []
    assert len(clock.run(5.0, heard=FOUR[:2], keepers=FOUR, beat_ms=120)) == 2
    assert clock.now_s - began_s < 2 * LEASE_S


def test_when_nobody_is_heard_we_may_be_cut_off_ourselves() -> None:
    clock = Clock()
    assert clock.run(FENCE_S - 1, heard=(), keepers=FOUR) == []
    assert clock.run(3.0, heard=(), keepers=FOUR) != []  # by then they have ended by themselves


def test_who_returns_before_that_was_never_lost_and_the_others_are_given_up_now() -> None:
    clock = Clock()
    assert clock.run(2.0, heard=(), keepers=FOUR) == []
    lost = clock.run(RETURN_S + 0.2, heard=("node2",), keepers=FOUR)
    assert sorted(node for node, _ in lost) == ["node0", "node1", "node3"]


def test_a_node_that_has_yet_to_come_to_this_coordinator_hides_no_cut() -> None:
    """All known nodes are silent: the first one that returns gives the others their time."""
    clock = Clock(nodes=FOUR[1:])
    clock.contact.expect("node0", clock.now_s + 60.0)
    assert clock.run(1.0, heard=(), keepers=FOUR) == []
    assert clock.run(0.5 * RETURN_S, heard=("node1",), keepers=FOUR) == []
    assert clock.run(RETURN_S, heard=("node1",), keepers=FOUR)[0] == ("node2", "silent for 3 beats")


def test_nodes_without_the_state_are_no_reason_to_give_up_those_that_have_it() -> None:
    clock = Clock()
    assert clock.run(5.0, heard=("node3",), keepers=FOUR[:3]) == []
    clock = Clock()
    assert clock.run(5.0, heard=("node2", "node3"), keepers=FOUR[:3]) != []


def test_where_no_node_has_the_state_each_node_in_contact_shows_that_the_others_are_silent() -> (
    None
):
    assert Clock().run(FENCE_S - 1, heard=(), keepers=()) == []
    assert Clock().run(1.0, heard=FOUR[:3], keepers=()) == [("node3", "silent for 3 beats")]
    clock = Clock()
    assert clock.run(2.0, heard=(), keepers=()) == []
    lost = clock.run(RETURN_S + 0.2, heard=("node2",), keepers=())
    assert sorted(node for node, _ in lost) == ["node0", "node1", "node3"]


def test_whose_connection_has_ended_may_come_back_until_its_lease_has_run_out() -> None:
    clock = Clock()
    clock.contact.leave("node1", "the agent's connection ended")
    assert clock.run(0.1, heard=("node0", "node2", "node3"), keepers=FOUR) == []
    clock.contact.beat("node1", clock.now_s)
    assert clock.run(1.0, heard=FOUR, keepers=FOUR) == []
    clock.contact.leave("node1", "the agent's connection ended")
    lost = clock.run(1.0, heard=("node0", "node2", "node3"), keepers=FOUR)
    assert lost == [("node1", "the agent's connection ended")]


def test_the_only_one_who_has_the_state_is_waited_for() -> None:
    clock = Clock(nodes=("node0", "node1"))
    clock.contact.leave("node0", "the agent's connection ended")
    assert clock.run(5.0, heard=("node1",), keepers=("node0",)) == []
    clock.contact.beat("node0", clock.now_s)  # it has connected again
    assert clock.run(1.0, heard=("node0", "node1"), keepers=("node0",)) == []
