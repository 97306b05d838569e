"""Tests of process groups that can be left at once, and of their rendezvous: real ranks, real gloo,
a real store.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from support import ranks
from support.ranks import Line, Ranks
from support.waiting import LIMIT_S, stays, wait_until

from chaoskit.coordinator.rendezvous import RendezvousBoard, RendezvousReply
from chaoskit.errors import Refused
from chaoskit.runtime.group.process_group import Group, disown, reown
from chaoskit.runtime.group.rendezvous import GenerationSuperseded, Rendezvous, RendezvousStore
from chaoskit.wire import frames, messages
from chaoskit.wire.messages import Exchange, Get, Put

TOKEN = "a token of this test"
CPU = torch.device("cpu")
GLOO_TIMEOUT_S = 600.0  # a rank that abort() does not free exceeds the limit of these tests
LEFT = {"GroupAborted", "GroupFailed"}  # by this rank first, or by a partner
SO_MAX_PACING_RATE = 47  # not in the socket module
STILL_S = 0.1  # how long a waiter must stay blocked
Address = tuple[str, int]


# -- the coordinator's store, as the coordinator serves it -----------------------------------------


class Server:
    """A RendezvousBoard that a thread serves."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self._loop = asyncio.new_event_loop()
        self._board = RendezvousBoard()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._arrived: list[messages.Message] = []
        self._waiting = 0  # requests that had no answer when they arrived
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._greet, sock=self._listener)
        )
        self._loop.run_forever()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await frames.accept_async(reader, writer, TOKEN)
            assert isinstance(await frames.read_message(reader), messages.RendezvousHello)
            while True:
                request = await frames.read_message(reader)
                replies = self._board.ask(writer, request)
                self._answer(replies)
                self._arrived.append(request)
                self._waiting += not isinstance(request, Put) and not any(
                    client is writer for client, _ in replies
                )
        except (ConnectionError, Refused, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    def _answer(self, replies: list[RendezvousReply]) -> None:
        for writer, message in replies:
            assert isinstance(writer, asyncio.StreamWriter)
            writer.write(frames.encode(message))

    def begin(self, generation: int, world: int) -> None:
        """Open a generation, as the coordinator does when it publishes a plan."""

        async def begin() -> None:
            self._answer(self._board.begin(generation, world))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(LIMIT_S)

    def await_arrival(self, *requests: messages.Message) -> None:
        """Wait until these requests have arrived, and have been answered if their answer is
        known.
        """
        wait_until(
            lambda: all(request in self._arrived for request in requests),
            f"the arrival of {requests}",
        )

    def await_waiting(self, count: int) -> None:
        """Wait until ``count`` requests have arrived that could not be answered at once."""
        wait_until(lambda: self._waiting >= count, f"{count} requests that wait")

    def stop(self) -> None:
        """End every connection and the thread."""

        async def stop() -> None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._loop.stop()

        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(stop(), self._loop)
            self._thread.join(LIMIT_S)
            self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server for one test."""
    started = Server()
    wait_until(started._loop.is_running, "the server")
    yield started
    started.stop()


# -- ranks -----------------------------------------------------------------------------------------


class Seat:
    """A rank's place in these tests: its number, the address of the server and its line to the
    test.
    """

    def __init__(self, line: Line, address: Address) -> None:
        self.rank, self.address = line.rank, address
        self.send, self.receive = line.send, line.receive

    def rendezvous(self) -> Rendezvous:
        return Rendezvous(self.address, TOKEN, f"worker{self.rank}")

    def form(self, generation: int, world: int, rank: int | None = None, **store: Any) -> Group:
        kind = store.pop("kind", RendezvousStore)
        store_made = kind(self.rendezvous(), generation, **store)
        return build(store_made, self.rank if rank is None else rank, world)


def build(store: RendezvousStore, rank: int, world: int) -> Group:
    return Group(store, rank, world, CPU, address="127.0.0.1", timeout_s=GLOO_TIMEOUT_S)


def sit(
    line: Line, address: Address, body: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    body(Seat(line, address), *arguments)


@contextmanager
def team(server: Server, size: int, body: Callable[..., None], *arguments: Any) -> Iterator[Ranks]:
    """Run ``body(seat, *arguments)`` on ranks that meet at the server."""
    with ranks.running(size, sit, server.address, body, arguments) as started:
        yield started


def around(group: Group, value: float, tag: int = 1) -> float:
    """Pass ``value`` to the next rank, and return the value of the previous one."""
    sent, received = torch.full((1000,), value), torch.empty(1000)
    works = [
        group.send(sent, (group.rank + 1) % group.size, tag),
        group.recv(received, (group.rank - 1) % group.size, tag),
    ]
    for work in works:
        work.wait()
    assert torch.equal(received, received[:1].expand(1000))
    return float(received[0])


def timed(act: Callable[[], object]) -> tuple[str, float]:
    """Return the name of the error that ``act`` raises ("" if it returns), and the time of its
    end.
    """
    try:
        act()
    except Exception as error:  # noqa: BLE001  # its type is what the test looks at
        return type(error).__name__, time.monotonic()
    return "", time.monotonic()


# -- groups ----------------------------------------------------------------------------------------


def exchange(seat: Seat) -> None:
    seat.receive()
    group = seat.form(1, 3)
    received = around(group, float(seat.rank))
    total = torch.tensor([10.0**seat.rank])
    with group.coalesce():
        work = group.all_reduce(total)
    work.wait()
    seat.send([group.rank, group.size, received, float(total)])


def test_ranks_form_a_group_and_exchange(server: Server) -> None:
    """Three ranks that know only the coordinator can send to each other and sum."""
    with team(server, 3, exchange) as members:
        server.begin(1, 3)
        members.send("go")
        assert members.receive() == [[0, 3, 2.0, 111.0], [1, 3, 0.0, 111.0], [2, 3, 1.0, 111.0]]


def wait_for_abort(seat: Seat, group: Group, source: int) -> None:
    """Wait in a receive that no rank serves while another thread aborts on order; send how it
    ended.
    """
    aborted: list[float] = []

    def obey() -> None:
        seat.receive()
        aborted.append(time.monotonic())
        group.abort()
        group.abort()

    work = group.recv(torch.empty(1000), source, 7)
    control = threading.Thread(target=obey)
    control.start()
    seat.send("waiting")
    kind, freed_s = timed(work.wait)
    control.join()
    seat.send([kind, freed_s, aborted[0]])


def await_waiting(members: Ranks) -> None:
    """Wait until all ranks have reported that they wait, and their main threads sleep."""
    assert members.receive() == ["waiting"] * len(members)
    for rank in members:
        rank.await_state("S")


def wait_in_a_circle(seat: Seat) -> None:
    seat.receive()
    group = seat.form(1, 3)
    wait_for_abort(seat, group, (seat.rank - 1) % 3)
    kind, _ = timed(lambda: around(group, 1.0))
    seat.send(kind)


def test_an_abort_frees_every_rank_that_waits(server: Server) -> None:
    """Ranks that wait for each other in a circle are all freed when other threads abort their
    groups.
    """
    with team(server, 3, wait_in_a_circle) as members:
        server.begin(1, 3)
        members.send("go")
        await_waiting(members)
        members.send("abort")
        kinds, freed_s, aborted_s = zip(*members.receive(), strict=True)
        assert set(kinds) <= LEFT
        assert min(aborted_s) <= min(freed_s)
        assert set(members.receive()) <= LEFT, "a group that was left cannot be used any more"


def wait_for_rank_0(seat: Seat) -> None:
    seat.receive()
    group = seat.form(1, 3)
    if seat.rank == 0:
        seat.send("waiting")
        seat.receive()
        group.abort()
        seat.receive()  # the rank lives on: its end must not be what frees the others
        return
    work = group.recv(torch.empty(1000), 0, 7)
    seat.send("waiting")
    kind, _ = timed(work.wait)
    seat.send(kind)


def test_one_ranks_abort_frees_those_that_wait_for_it(server: Server) -> None:
    """The connections of an aborted group are shut down, so partners notice without any message."""
    with team(server, 3, wait_for_rank_0) as members:
        server.begin(1, 3)
        members.send("go")
        await_waiting(members)
        members.send("abort", 0)
        assert members.receive(1, 2) == ["GroupFailed"] * 2
        members.send("end", 0)


def slow_down(bytes_s: int) -> None:
    """Have the kernel send no faster than ``bytes_s`` on any TCP connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        with (
            suppress(OSError),
            socket.socket(fileno=os.dup(int(name))) as connection,
        ):  # other descriptors have no pace
            connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_s)


def stop_in_a_transfer(seat: Seat) -> None:
    seat.receive()
    group = seat.form(1, 2)
    size_bytes = 2**26
    data = torch.full((size_bytes // 4,), float(seat.rank))
    if seat.rank == 1:
        slow_down(size_bytes // 300)  # the transfer takes longer than a test may
        group.send(data, 0, 7).wait()
    work = group.recv(data, 1, 7)
    while not data[0]:
        time.sleep(0.001)

    def obey() -> None:
        seat.receive()
        group.abort()

    control = threading.Thread(target=obey)
    control.start()
    seat.send("begun")
    kind, _ = timed(work.wait)
    control.join()
    seat.send([kind, float(data[-1])])


def test_an_abort_frees_a_rank_in_the_middle_of_a_transfer(server: Server) -> None:
    """A receive that has begun is freed even if its sender is stopped: gloo itself forgets such a
    receive.
    """
    with team(server, 2, stop_in_a_transfer) as members:
        server.begin(1, 2)
        members.send("go")
        assert members.receive(0) == ["begun"]
        members[1].signal(signal.SIGSTOP)
        members[1].await_state("T")
        members[0].await_state("S")
        members.send("abort", 0)
        ((kind, last),) = members.receive(0)
        assert kind in LEFT
        assert last == 0.0, "the transfer was over before the abort"
        members.kill(1)


def survive(seat: Seat) -> None:
    seat.receive()
    group = seat.form(1, 3)
    wait_for_abort(seat, group, (seat.rank - 1) % 3)
    rank = seat.receive()
    second = seat.form(2, 2, rank)
    seat.send(around(second, 10.0 + seat.rank))
    second.abort()
    seat.receive()
    seat.send(around(seat.form(3, 2, rank), 20.0 + seat.rank))


def test_survivors_of_a_kill_form_the_next_generation(server: Server) -> None:
    """A rank is killed while all wait for each other; the others abort, meet again and exchange in
    a smaller world.
    """
    with team(server, 3, survive) as members:
        server.begin(1, 3)
        members.send("go")
        await_waiting(members)
        members.kill(1)
        members.send("abort", 0, 2)
        assert {kind for kind, _, _ in members.receive(0, 2)} <= LEFT
        server.begin(2, 2)
        members[0].send(0)
        members[2].send(1)
        assert members.receive(0, 2) == [12.0, 10.0]
        server.begin(3, 2)
        members.send("again", 0, 2)
        assert members.receive(0, 2) == [22.0, 20.0]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    return client, server


def talks(pair: tuple[socket.socket, socket.socket]) -> bool:
    """Return whether bytes pass in both directions."""
    for source, target in (pair, pair[::-1]):
        source.settimeout(LIMIT_S)
        target.settimeout(LIMIT_S)
        with suppress(OSError):
            source.sendall(b"alive")
            if target.recv(5) == b"alive":
                continue
        return False
    return True


class Meanwhile(RendezvousStore):
    """A store that calls ``act`` while the group is being built, when gloo asks for an address."""

    def __init__(self, rendezvous: Rendezvous, generation: int, act: Callable[[], None]) -> None:
        super().__init__(rendezvous, generation)
        self._act: Callable[[], None] | None = act

    def get(self, key: str) -> bytes:
        act, self._act = self._act, None
        if act is not None:
            act()
        return super().get(key)


def keep_sockets(seat: Seat) -> None:
    seat.receive()
    pairs = {"before": tcp_pair()}
    listeners: list[socket.socket] = []

    def open_more() -> None:
        pairs["during"], pairs["local"] = tcp_pair(), socket.socketpair()
        for end in pairs["during"]:
            disown(end.fileno())
        listeners.append(socket.create_server(("127.0.0.1", 0)))

    group = seat.form(1, 2, kind=Meanwhile, act=open_more)
    pairs["after"] = tcp_pair()
    around(group, 1.0)
    group.abort()
    kind, _ = timed(lambda: group.recv(torch.empty(8), 1 - seat.rank, 3).wait())
    pairs["listener"] = (
        socket.create_connection(listeners[0].getsockname()),
        listeners[0].accept()[0],
    )
    seat.send([kind, {name: talks(pair) for name, pair in pairs.items()}])
    for end in pairs["during"]:
        reown(end.fileno())


def test_sockets_of_the_process_survive_an_abort(server: Server) -> None:
    """Connections made before, after, or meanwhile and disowned, and local ones, still work after
    an abort.
    """
    with team(server, 2, keep_sockets) as members:
        server.begin(1, 2)
        members.send("go")
        names = ["before", "during", "local", "after", "listener"]
        for kind, alive in members.receive():
            assert kind in LEFT
            assert alive == dict.fromkeys(names, True)


def leave_the_first(seat: Seat) -> None:
    seat.receive()
    first = seat.form(1, 2)
    seat.send("formed")
    seat.receive()
    second = seat.form(2, 2)
    first.abort()
    seat.send(around(second, float(seat.rank)))


def test_an_abort_leaves_other_groups_of_the_process_alone(server: Server) -> None:
    """Leaving an old generation does not disturb the next one, which may be in use already."""
    with team(server, 2, leave_the_first) as members:
        server.begin(1, 2)
        members.send("go")
        assert members.receive() == ["formed"] * 2
        server.begin(2, 2)
        members.send("go")
        assert members.receive() == [1.0, 0.0]


def open_sockets() -> set[str]:
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if link.startswith("socket:")}


def count_sockets(seat: Seat, leave: str) -> None:
    before = open_sockets()
    for generation in (1, 2, 3):
        seat.receive()
        rendezvous = seat.rendezvous()
        store = RendezvousStore(rendezvous, generation)
        group = build(store, seat.rank, 2)
        around(group, 1.0)
        getattr(group, leave)()
        rendezvous.close()
        seat.send("left")
        seat.receive()  # gloo of the partner may still be in the exchange
        del group, store, rendezvous
        wait_until(lambda: open_sockets() <= before, "the end of all sockets of the group")
        seat.send("freed")


@pytest.mark.parametrize("leave", ["abort", "close"])
def test_groups_that_were_left_hold_no_sockets(server: Server, leave: str) -> None:
    """Generation after generation, no socket of a group stays open."""
    with team(server, 2, count_sockets, leave) as members:
        for generation in (1, 2, 3):
            server.begin(generation, 2)
            members.send("go")
            assert members.receive() == ["left"] * 2
            members.send("free")
            assert members.receive() == ["freed"] * 2


def be_alone(seat: Seat) -> None:
    seat.receive()
    group = seat.form(1, 1)
    total = torch.tensor([3.0])
    group.all_reduce(total).wait()
    group.abort()
    group.close()
    seat.send(float(total))


def test_a_group_of_one_can_be_left(server: Server) -> None:
    """A rank that is alone in its world has no connections, and abort does no harm."""
    with team(server, 1, be_alone) as members:
        server.begin(1, 1)
        members.send("go")
        assert members.receive() == [3.0]


# -- the rendezvous --------------------------------------------------------------------------------


def connect(server: Server, worker: str) -> Rendezvous:
    return Rendezvous(server.address, TOKEN, worker)


class Waiter:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.ended = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # noqa: BLE001  # shown by the test
            self.error = error
        self.ended.set()


def still_waiting(*waiters: Waiter) -> None:
    """Check that all waiters still wait; called once their requests have arrived, when an answer
    would be on its way.
    """
    stays(lambda: not any(waiter.ended.is_set() for waiter in waiters), "all wait", for_s=STILL_S)


def test_values_pass_in_any_order(server: Server) -> None:
    """A value is given out once it is put, whether it was asked for before or after; a store asks
    once.
    """
    server.begin(1, 2)
    first, second = connect(server, "a"), connect(server, "b")
    first.put(1, "early", b"\x00\xff")
    server.await_arrival(Put(1, "early", b"\x00\xff"))
    assert second.get(1, "early") == b"\x00\xff"
    waiter = Waiter(lambda: second.get(1, "late"))
    server.await_arrival(Get(1, "late"))
    still_waiting(waiter)
    first.put(1, "late", b"")
    assert waiter.ended.wait(LIMIT_S)
    assert waiter.result == b""
    store = RendezvousStore(first, 1)
    store.set("text", "as bytes")
    RendezvousStore(second, 1).wait(["text", "early"])
    assert RendezvousStore(second, 1).get("text") == b"as bytes"


def test_an_exchange_gives_the_values_of_all_by_rank(server: Server) -> None:
    """All ranks wait for the last one, and then have the same values in the order of ranks, in any
    order of arrival.
    """
    server.begin(1, 3)
    lines = [connect(server, str(rank)) for rank in range(3)]
    waiters = []
    for rank in (2, 0):
        waiters.append(
            Waiter(partial(lines[rank].exchange, 1, "standing", rank, b"rank %d" % rank))
        )
        server.await_arrival(Exchange(1, "standing", rank, b"rank %d" % rank))
    still_waiting(*waiters)
    expected = (b"rank 0", b"rank 1", b"rank 2")
    assert lines[1].exchange(1, "standing", 1, b"rank 1") == expected
    for waiter in waiters:
        assert waiter.ended.wait(LIMIT_S)
        assert waiter.result == expected


@pytest.mark.parametrize("call", ["get", "exchange"])
def test_an_interrupt_frees_the_waiter(server: Server, call: str) -> None:
    """A call that waits for a missing rank is freed by another thread, and later calls raise the
    same error at once.
    """
    server.begin(1, 2)
    rendezvous = connect(server, "a")

    def wait() -> Any:
        if call == "get":
            return rendezvous.get(1, "never")
        return rendezvous.exchange(1, "standing", 0, b"")

    waiter = Waiter(wait)
    server.await_arrival(Get(1, "never") if call == "get" else Exchange(1, "standing", 0, b""))
    still_waiting(waiter)
    rendezvous.interrupt()
    rendezvous.interrupt()
    assert waiter.ended.wait(LIMIT_S)
    assert isinstance(waiter.error, GenerationSuperseded)
    with pytest.raises(GenerationSuperseded):
        wait()
    with pytest.raises(GenerationSuperseded):
        rendezvous.put(1, "key", b"")
    rendezvous.close()


@pytest.mark.parametrize("call", ["get", "exchange"])
def test_a_newer_generation_frees_all_that_wait_for_an_older_one(server: Server, call: str) -> None:
    """The coordinator answers every waiter of the old generation, and late requests for it at
    once.
    """
    server.begin(1, 3)
    lines = [connect(server, str(rank)) for rank in range(2)]

    def wait(rank: int) -> Any:
        if call == "get":
            return lines[rank].get(1, "never")
        return lines[rank].exchange(1, "standing", rank, b"")

    waiters = []
    for rank in range(2):
        waiters.append(Waiter(partial(wait, rank)))
        server.await_waiting(rank + 1)
    still_waiting(*waiters)
    server.begin(2, 2)
    for waiter in waiters:
        assert waiter.ended.wait(LIMIT_S)
        assert isinstance(waiter.error, GenerationSuperseded)
    with pytest.raises(GenerationSuperseded, match="generation 1 is over"):
        wait(0)
    lines[0].put(1, "key", b"of the old one")
    lines[0].put(2, "key", b"of the new one")
    assert lines[1].get(2, "key") == b"of the new one", (
        "the connection can be used on, and old keys are fenced off"
    )


def test_a_generation_starts_empty(server: Server) -> None:
    """Keys and arrivals of one generation are not visible in the next."""
    server.begin(1, 2)
    first, second = connect(server, "a"), connect(server, "b")
    first.put(1, "key", b"1")
    assert first.get(1, "key") == b"1"
    arrived = Waiter(lambda: first.exchange(1, "standing", 0, b"1"))
    server.await_arrival(Exchange(1, "standing", 0, b"1"))
    server.begin(2, 2)
    assert arrived.ended.wait(LIMIT_S)
    asked = Waiter(lambda: first.get(2, "key"))
    exchanged = Waiter(lambda: second.exchange(2, "standing", 1, b"2"))
    server.await_arrival(Get(2, "key"), Exchange(2, "standing", 1, b"2"))
    still_waiting(asked, exchanged)
    connect(server, "c").put(2, "key", b"2")
    assert asked.ended.wait(LIMIT_S)
    assert asked.result == b"2"
    assert connect(server, "d").exchange(2, "standing", 0, b"0") == (b"0", b"2")


def test_a_lost_coordinator_is_a_connection_error(server: Server) -> None:
    """If the connection ends without an interrupt, the error is that the coordinator is gone."""
    server.begin(1, 2)
    rendezvous = connect(server, "a")
    waiter = Waiter(lambda: rendezvous.get(1, "never"))
    server.await_arrival(Get(1, "never"))
    still_waiting(waiter)
    server.stop()
    assert waiter.ended.wait(LIMIT_S)
    assert isinstance(waiter.error, ConnectionError)


def test_a_stranger_is_refused(server: Server) -> None:
    """The store requires the token, too."""
    server.begin(1, 1)
    with pytest.raises((Refused, ConnectionError)):
        Rendezvous(server.address, "another token", "a")


def build_alone(seat: Seat) -> None:
    seat.receive()
    rendezvous = seat.rendezvous()
    store = RendezvousStore(rendezvous, 1)

    def obey() -> None:
        seat.receive()
        rendezvous.interrupt()

    control = threading.Thread(target=obey)
    control.start()
    kind, _ = timed(lambda: build(store, 0, 2))
    control.join()
    seat.send(kind)
    seat.receive()
    group = seat.form(2, 1)
    total = torch.tensor([3.0])
    group.all_reduce(total).wait()
    seat.send(float(total))


def test_an_interrupt_frees_a_rank_that_builds_a_group(server: Server) -> None:
    """A rank that waits inside gloo for the address of a missing partner is freed, and forms the
    next group.
    """
    with team(server, 1, build_alone) as members:
        server.begin(1, 2)
        members.send("go")
        server.await_waiting(1)
        members.send("interrupt")
        assert members.receive() == ["GenerationSuperseded"]
        server.begin(2, 1)
        members.send("again")
        assert members.receive() == [3.0]
