"""Tests of a hand on the network: packets of real sockets between two namespaces."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from support.hand.network import PORT, WHY_NOT, Pair, open_pair
from support.waiting import stays, wait_until

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"packets: {WHY_NOT}")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair() as made:
        yield made


def test_a_cut_drops_and_counts_the_packets_of_its_addresses_in_both_directions(pair: Pair) -> None:
    with pair.hand() as client:
        answer = client.do("cut", addresses=[pair.far], lasts_s=600)
        assert answer["armed"] is True
        assert not any(pair.arrives() or pair.answers() for _ in range(3))
        pair.check_open("other")
        packets = client.do("counters", effect=answer["effect"])["packets"]
        assert packets["in"] == {"seen": 3, "dropped": 3}
        assert packets["out"]["dropped"] == 3
        lifted = client.do("lift", effect=answer["effect"])
        assert lifted["packets"] == packets
        pair.check_open()
        assert pair.tables() == ""


@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_cut_in_one_direction_lets_the_other_one_pass(pair: Pair, direction: str) -> None:
    with pair.hand() as client:
        answer = client.do("cut", addresses=[pair.far], directions=[direction], lasts_s=600)
        assert pair.arrives() == (direction == "in")
        assert pair.answers() == (direction == "out")
        assert list(client.do("counters", effect=answer["effect"])["packets"]) == [direction]


def test_a_cut_from_an_address_that_sends_nothing_counts_nothing(pair: Pair) -> None:
    """The rules are there, but they have no effect, and the evidence says so."""
    with pair.hand() as client:
        answer = client.do("cut", addresses=["10.9.9.9", "10.9.9.8/30", "fd00::7"], lasts_s=600)
        pair.check_open()
        packets = client.do("counters", effect=answer["effect"])["packets"]
        assert packets == {side: {"seen": 0, "dropped": 0} for side in ("in", "out")}


def test_a_cut_ends_after_its_time_without_a_further_message(pair: Pair) -> None:
    with pair.hand() as client:
        answer = client.do("cut", addresses=[pair.far], lasts_s=0.8)
        assert not pair.arrives()
        ended = client.event("ended", answer["effect"])
        assert (ended["why"], ended["evidence"]["packets"]["out"]["dropped"]) == ("expired", 1)
        assert ended["evidence"]["lasted_s"] >= 0.79
        pair.check_open()
        assert pair.tables() == ""


def test_rules_of_a_killed_hand_expire_in_the_kernel(pair: Pair) -> None:
    with pair.hand() as client:
        began_s = time.monotonic()
        client.do("cut", addresses=[pair.far], lasts_s=2.0)
        client.process.kill()
        client.wait()
        assert not pair.arrives()
        wait_until(pair.arrives, "the end of the cut")
        assert 1.8 < time.monotonic() - began_s < 8
        assert "chaoskit_hand" in pair.tables()


def test_extended_rules_of_a_killed_hand_last_longer(pair: Pair) -> None:
    with pair.hand() as client:
        answer = client.do("cut", addresses=[pair.far], lasts_s=0.6)
        began_s = time.monotonic()
        client.do("extend", effect=answer["effect"], lasts_s=3.0)
        client.process.kill()
        client.wait()
        stays(lambda: not pair.arrives(), "the cut", for_s=began_s + 2.0 - time.monotonic())
        wait_until(pair.arrives, "the end of the cut")
        assert time.monotonic() - began_s >= 2.8


def test_an_extended_cut_can_be_shortened(pair: Pair) -> None:
    with pair.hand() as client:
        answer = client.do("cut", addresses=[pair.far], lasts_s=600)
        client.do("extend", effect=answer["effect"], lasts_s=0.3)
        assert client.event("ended")["why"] == "expired"
        pair.check_open()


def test_sweep_removes_the_rules_of_dead_hands_only(pair: Pair) -> None:
    with pair.hand() as dead, pair.hand() as alive, pair.hand() as sweeping:
        dead_table = dead.do("cut", addresses=[pair.far], lasts_s=600)["table"]
        alive_table = alive.do("cut", addresses=[pair.other], lasts_s=600)["table"]
        pair.run("nft", "add", "table", "inet", "chaoskit_other")
        swept = sweeping.do("sweep")
        assert (swept["removed"], sorted(swept["alive"])) == ([], sorted([dead_table, alive_table]))
        dead.process.kill()
        dead.wait()
        assert not pair.arrives()
        swept = sweeping.do("sweep")
        assert (swept["removed"], swept["alive"]) == ([dead_table], [alive_table])
        pair.check_open()
        assert not pair.arrives("other")
        assert "chaoskit_other" in pair.tables()


@pytest.mark.parametrize("end", ["end of input", "SIGTERM", "silence"])
def test_the_end_of_a_hand_removes_its_rules(pair: Pair, end: str) -> None:
    with pair.hand("--silent-s", "1") as client:
        client.do("cut", addresses=[pair.far], lasts_s=600)
        client.do("loss", addresses=[pair.other], share=1.0, lasts_s=600)
        assert not pair.arrives()
        assert not pair.arrives("other")
        if end == "end of input":
            client.close_input()
        elif end == "SIGTERM":
            client.process.terminate()
        assert client.wait() == 0
        assert {line["why"] for line in client.lines if "event" in line} == {end}
        assert pair.tables() == ""
        pair.check_open()
        pair.check_open("other")


@pytest.mark.parametrize("end", ["end of input", "SIGTERM"])
def test_a_silence_outlives_its_hand_and_expires_in_the_kernel(pair: Pair, end: str) -> None:
    near, far = pair.connection()
    with pair.hand() as client:
        began_s = time.monotonic()
        answer = client.do("silence", lasts_s=3.0)
        assert answer["armed"] is True
        near.close()  # its end is not heard
        assert not any(pair.arrives(name) or pair.answers(name) for name in ("far", "other"))
        assert client.do("counters", effect=answer["effect"])["packets"]["out"]["dropped"] >= 3
        if end == "SIGTERM":
            client.process.terminate()
        else:
            client.close_input()
        assert client.wait() == 0
        assert client.event("ending")["left"] == [answer["effect"]]
        far.settimeout(max(0.1, began_s + 2.0 - time.monotonic()))
        with pytest.raises(TimeoutError):
            far.recv(1)
        wait_until(pair.arrives, "the end of the silence")
        assert 2.8 < time.monotonic() - began_s < 9


def test_a_silence_can_be_lifted(pair: Pair) -> None:
    with pair.hand() as client:
        answer = client.do("silence", lasts_s=600)
        assert not pair.arrives()
        client.do("lift", effect=answer["effect"])
        pair.check_open()
        assert pair.tables() == ""


def test_a_share_of_the_packets_is_lost_and_the_counters_tell_it(pair: Pair) -> None:
    with pair.hand() as client:
        answer = client.do(
            "loss", addresses=[f"{pair.far}/32"], directions=["out"], share=0.5, lasts_s=600
        )
        sender, destination = pair.socket("near", socket.SOCK_DGRAM), (pair.far, PORT)
        for _ in range(2_000):
            with contextlib.suppress(PermissionError):
                sender.sendto(b"0", destination)
        out = client.do("counters", effect=answer["effect"])["packets"]["out"]
        assert out["seen"] == 2_000
        assert out["dropped"] / out["seen"] == pytest.approx(0.5, abs=0.06)


def test_connections_to_an_address_are_reset_by_their_sockets(pair: Pair) -> None:
    near, far = pair.connection()
    other_near, other_far = pair.connection()
    with pair.hand() as client:
        answer = client.do("reset", addresses=[pair.far])
        assert answer["connections"] == 2
        assert answer["sockets"] == {"done": 2}
        assert answer["remaining"] == 0
        for end in (near, far, other_near, other_far):
            with pytest.raises(ConnectionError):
                end.recv(1)
        again = client.do("reset", addresses=[pair.far])
        assert (again["connections"], again["remaining"]) == (0, 0)
        assert pair.connection()


def test_connections_to_other_addresses_are_left_alone(pair: Pair) -> None:
    near, far = pair.connection()
    with pair.hand() as client:
        assert client.do("reset", addresses=[pair.other])["connections"] == 0
        far.sendall(b"x")
        assert near.recv(1) == b"x"


def test_connections_are_reset_by_answers_to_their_packets(pair: Pair) -> None:
    near, far = pair.connection()
    idle, _ = pair.connection()
    with pair.hand() as client:
        answer = client.do("reset", addresses=[pair.far], by="packets", lasts_s=1.5)
        assert (answer["connections"], answer["remaining"]) == (2, 2)
        new_near, new_far = pair.connection()
        far.sendall(b"x")
        with pytest.raises(ConnectionError):
            wait_until(lambda: far.send(b"y") and None, "the reset")
        with pytest.raises(ConnectionError):
            wait_until(lambda: near.send(b"y") and None, "the reset")
        evidence = client.event("ended", answer["effect"])["evidence"]
        assert evidence["packets"]["in"]["reset"] >= 1
        assert evidence["packets"]["out"]["reset"] >= 1
        assert evidence["remaining"] == 1  # the idle one: no packet of it came
        new_far.sendall(b"x")
        assert new_near.recv(1) == b"x"
        idle.sendall(b"x")


def connects(pair: Pair) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        pair.connection()
        return True
    return False


def test_all_segments_are_refused_as_long_as_the_effect_lasts(pair: Pair) -> None:
    near, far = pair.connection()
    with pair.hand() as client:
        answer = client.do("refuse", addresses=[pair.far], lasts_s=600)
        with pytest.raises(ConnectionError):
            wait_until(lambda: near.send(b"x") and None, "the reset")
        with pytest.raises(ConnectionError):
            wait_until(lambda: far.send(b"x") and None, "the reset")
        assert not any(connects(pair) for _ in range(3))
        pair.check_open()
        packets = client.do("counters", effect=answer["effect"])["packets"]
        assert packets["in"]["refused"] >= 1
        assert packets["out"]["refused"] >= 4
        assert client.do("lift", effect=answer["effect"])["packets"] == packets
        assert connects(pair)
        assert pair.tables() == ""


def test_refused_segments_of_a_killed_hand_pass_after_their_time(pair: Pair) -> None:
    with pair.hand() as client:
        client.do("refuse", addresses=[pair.far], lasts_s=1.5)
        assert not connects(pair)
        client.process.kill()
        client.wait()
        assert not connects(pair)
        wait_until(lambda: connects(pair), "the end of the resets")


@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_new_connection_tells_whether_packets_pass(pair: Pair, direction: str) -> None:
    with pair.hand() as client, pair.socket("far", socket.SOCK_STREAM) as listener:
        listener.bind((pair.far, 0))
        port = listener.getsockname()[1]
        ends = {"address": pair.far, "port": port}
        refused = client.do("connect", **ends)
        assert refused["how"] == "refused"
        assert refused["took_ms"] < 900
        listener.listen()
        assert client.do("connect", **ends)["how"] == "connected"
        effect = client.do("cut", addresses=[pair.far], directions=[direction], lasts_s=600)
        blocked = client.do("connect", **ends, within_s=0.3)
        assert (blocked["how"], 300 <= blocked["took_ms"] < 1400) == ("timeout", True)
        client.do("lift", effect=effect["effect"])
        assert client.do("connect", **ends)["how"] == "connected"
        failed = client.do("connect", address="192.0.2.1", port=port)
        assert (failed["how"], failed["error"]) == ("failed", "ENETUNREACH")


@pytest.mark.parametrize(
    ("field", "value"),
    [("address", "host"), ("address", 7), ("port", 0), ("port", 2**16), ("within_s", 3.1)],
)
def test_bad_fields_of_a_connection_are_refused(pair: Pair, field: str, value: object) -> None:
    with pair.hand() as client:
        fields = {"address": pair.far, "port": PORT, field: value}
        assert client.ask("connect", **fields)["error"]["field"] == field


def seconds_to_send(pair: Pair, size_bytes: int) -> float:
    near, far = pair.connection()
    with near, far:
        began_s = time.monotonic()
        near.sendall(b"x" * size_bytes)
        near.shutdown(socket.SHUT_WR)
        while far.recv(65536):
            pass
        return time.monotonic() - began_s


def test_a_limit_of_bandwidth_slows_what_is_sent_and_ends(pair: Pair) -> None:
    with pair.hand() as client:
        fast_s = seconds_to_send(pair, 250_000)
        answer = client.do("bandwidth", rate_bit_s=2_000_000, lasts_s=600)
        assert (answer["armed"], answer["interface"]) == (True, "eth0")
        slow_s = seconds_to_send(pair, 250_000)
        assert slow_s > max(0.7, fast_s)
        lifted = client.do("lift", effect=answer["effect"])
        assert lifted["sent_bytes"] > 250_000
        assert lifted["held_up"] > 0
        assert "tbf" not in pair.run("tc", "qdisc", "show", "dev", "eth0")
        assert pair.tables() == ""


def test_a_limit_of_bandwidth_without_traffic_says_so(pair: Pair) -> None:
    with pair.hand() as client:
        answer = client.do("bandwidth", rate_bit_s=2_000_000, lasts_s=0.3)
        evidence = client.event("ended", answer["effect"])["evidence"]
        assert (evidence["held_up"], evidence["dropped"]) == (0, 0)
        assert "tbf" not in pair.run("tc", "qdisc", "show", "dev", "eth0")


def test_sweep_removes_the_limit_of_a_dead_hand(pair: Pair) -> None:
    with pair.hand() as dead, pair.hand() as sweeping:
        dead.do("bandwidth", rate_bit_s=2_000_000, lasts_s=600)
        assert sweeping.do("sweep")["removed"] == []
        dead.process.kill()
        dead.wait()
        assert "tbf" in pair.run("tc", "qdisc", "show", "dev", "eth0")
        swept = sweeping.do("sweep")
        assert swept["interfaces"] == ["eth0"]
        assert len(swept["removed"]) == 1
        assert "tbf" not in pair.run("tc", "qdisc", "show", "dev", "eth0")


def test_an_interface_with_a_queue_of_its_own_is_left_alone(pair: Pair) -> None:
    foreign = ("root", "handle", "7:", "tbf", "rate", "9mbit", "burst", "9k", "latency", "9ms")
    pair.run("tc", "qdisc", "add", "dev", "eth0", *foreign)
    with pair.hand() as client:
        error = client.ask("bandwidth", rate_bit_s=2_000_000, lasts_s=600)["error"]
        assert error["field"] == "interface"
        assert pair.tables() == ""
        assert "tbf 7:" in pair.run("tc", "qdisc", "show", "dev", "eth0")


def test_without_net_admin_each_act_is_unable_and_names_the_capability(pair: Pair) -> None:
    bare = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    with pair.hand(prefix=bare) as client:
        assert set(client.do("hello")["unable"]) == {"cut", "loss", "refuse", "reset"}
        acts = {"cut": {"addresses": [pair.far]}, "bandwidth": {"rate_bit_s": 10_000}}
        acts["refuse"] = {"addresses": [pair.far]}
        acts["loss"] = {"addresses": [pair.far], "share": 0.5}
        for do, fields in acts.items():
            unable = client.ask(do, **fields, lasts_s=9)["unable"]
            assert "NET_ADMIN" in unable["remedy"], unable
        near, _ = pair.connection()
        for by in ("any", "sockets", "packets"):
            unable = client.ask("reset", addresses=[pair.far], by=by)["unable"]
            assert "NET_ADMIN" in unable["remedy"], unable
        assert near.send(b"x")
        pair.check_open()


def test_the_kernel_of_a_hand_with_all_rights_refuses_nothing(pair: Pair) -> None:
    with pair.hand() as client:
        assert client.do("hello")["unable"] == {}
        assert pair.tables() == ""
