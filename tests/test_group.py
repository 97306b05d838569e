"""Process groups that can be left at once, and the rendezvous behind them: real ranks, real gloo, a real store."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch

from chaoskit import messages, wire
from chaoskit.control.rendezvous import RendezvousBoard, Reply
from chaoskit.errors import Refused
from chaoskit.runtime.group import Group, disown, reown
from chaoskit.runtime.rendezvous import GenerationSuperseded, Rendezvous, RendezvousStore

TOKEN = "a token of this test"
CPU = torch.device("cpu")
WAIT_S = 60.0
GLOO_TIMEOUT_S = 120.0  # what a rank would wait for without abort()
FREED_S = 10.0  # an abort takes 2 ms; the machine may be busy
LEFT = {"GroupAborted", "RuntimeError"}  # by this rank first, or by a partner
Address = tuple[str, int]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # a forked child hangs after a multi-threaded operation in its parent


# -- the coordinator's store, as the coordinator serves it --------------------------------------------------------


class Server:
    """Serves a RendezvousBoard from a thread. To be started after the ranks are forked: they must not inherit it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self.listener.getsockname()
        self._loop = asyncio.new_event_loop()
        self._board = RendezvousBoard()
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._greet, sock=self.listener))
        self._loop.run_forever()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await wire.accept_async(reader, writer, TOKEN)
            assert isinstance(await wire.read_message(reader), messages.RendezvousHello)
            while True:
                request = await wire.read_message(reader)
                self._answer(self._board.ask(writer, request))
        except (ConnectionError, Refused, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    def _answer(self, replies: list[Reply]) -> None:
        for writer, message in replies:
            assert isinstance(writer, asyncio.StreamWriter)
            writer.write(wire.encode(message))

    def begin(self, generation: int, world: int) -> None:
        """Open a generation, as the coordinator does when it publishes a plan."""

        async def begin() -> None:
            self._answer(self._board.begin(generation, world))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(WAIT_S)

    def arrived(self, name: str) -> frozenset[int]:
        async def arrived() -> frozenset[int]:
            return self._board.arrived(name)

        return asyncio.run_coroutine_threadsafe(arrived(), self._loop).result(WAIT_S)

    def await_arrival(self, name: str, ranks: set[int]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while self.arrived(name) != ranks:
            assert time.monotonic() < deadline_s

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
            self._thread.join(WAIT_S)
            self._loop.close()


# -- ranks --------------------------------------------------------------------------------------------------------


class Line:
    """One end of a conversation in JSON lines."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(WAIT_S)
        self._file = connection.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._connection.close()

    def say(self, value: Any) -> None:
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def hear(self) -> Any:
        line = self._file.readline()
        assert line, "the other side is gone; see its output"
        return json.loads(line)


class Seat:
    """What a rank's process has: its rank, the coordinator's address and its line to the test."""

    def __init__(self, rank: int, address: Address, line: Line) -> None:
        self.rank, self.address = rank, address
        self.say, self.hear = line.say, line.hear

    def rendezvous(self) -> Rendezvous:
        return Rendezvous(self.address, TOKEN, f"worker{self.rank}")

    def form(self, generation: int, world: int, rank: int | None = None, **store: Any) -> Group:
        kind = store.pop("kind", RendezvousStore)
        found = kind(self.rendezvous(), generation, **store)
        return build(found, self.rank if rank is None else rank, world)


def build(store: RendezvousStore, rank: int, world: int) -> Group:
    return Group(store, rank, world, CPU, address="127.0.0.1", timeout_s=GLOO_TIMEOUT_S)


class Team:
    """Forked ranks and the server that they meet at."""

    def __init__(self, size: int, body: Callable[[Seat], None]) -> None:
        self.server = Server()
        self.lines: list[Line] = []
        self.pids: list[int] = []
        self._killed: set[int] = set()
        pairs = [socket.socketpair() for _ in range(size)]
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                self._live(rank, body, pairs)
            self.pids.append(pid)
        for ours, theirs in pairs:
            theirs.close()
            self.lines.append(Line(ours))
        self.server.start()

    def _live(self, rank: int, body: Callable[[Seat], None], pairs: list[tuple[socket.socket, socket.socket]]) -> None:
        code = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            self.server.listener.close()
            for number, (ours, theirs) in enumerate(pairs):
                ours.close()
                if number != rank:
                    theirs.close()
            body(Seat(rank, self.server.address, Line(pairs[rank][1])))
            code = 0
        except BaseException:  # noqa: BLE001  # the child of a test reports it and ends
            traceback.print_exc()
        finally:
            os._exit(code)

    def say(self, value: Any, *ranks: int) -> None:
        for rank in ranks or range(len(self.lines)):
            self.lines[rank].say(value)

    def hear(self, *ranks: int) -> list[Any]:
        return [self.lines[rank].hear() for rank in ranks or range(len(self.lines))]

    def kill(self, rank: int) -> None:
        self._killed.add(rank)
        os.kill(self.pids[rank], signal.SIGKILL)

    def end(self, expect_success: bool) -> None:
        """Wait for the ranks, which have nothing left to do; after a failure, end them."""
        codes: dict[int, int] = {}
        deadline_s = time.monotonic() + (WAIT_S if expect_success else 0)
        while len(codes) < len(self.pids):
            for rank, pid in enumerate(self.pids):
                if rank not in codes:
                    if time.monotonic() > deadline_s:
                        os.kill(pid, signal.SIGKILL)
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        for line in self.lines:
            line.close()
        self.server.stop()
        if expect_success:
            assert codes == {rank: -signal.SIGKILL if rank in self._killed else 0 for rank in codes}


@contextmanager
def team(size: int, body: Callable[[Seat], None]) -> Iterator[Team]:
    """Ranks that run ``body``, and must do so without an error."""
    started = Team(size, body)
    try:
        yield started
    except BaseException:
        started.end(expect_success=False)
        raise
    started.end(expect_success=True)


def around(group: Group, value: float, tag: int = 1) -> float:
    """Pass ``value`` to the next rank; what the previous one passed."""
    mine, theirs = torch.full((1000,), value), torch.empty(1000)
    works = [
        group.send(mine, (group.rank + 1) % group.size, tag),
        group.recv(theirs, (group.rank - 1) % group.size, tag),
    ]
    for work in works:
        work.wait()
    assert torch.equal(theirs, theirs[:1].expand(1000))
    return float(theirs[0])


def timed(act: Callable[[], object]) -> tuple[str, float]:
    """The name of the error that ``act`` raises ("" if it returns), and when that was."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  # its type is what the test looks at
        return type(error).__name__, time.monotonic()
    return "", time.monotonic()


# -- groups -------------------------------------------------------------------------------------------------------


def test_ranks_form_a_group_and_exchange() -> None:
    """Three ranks that know only the coordinator can send to each other and sum."""

    def body(seat: Seat) -> None:
        seat.hear()
        group = seat.form(1, 3)
        received = around(group, float(seat.rank))
        total = torch.tensor([10.0**seat.rank])
        with group.coalesce():
            work = group.all_reduce(total)
        work.wait()
        seat.say([group.rank, group.size, received, float(total)])

    with team(3, body) as ranks:
        ranks.server.begin(1, 3)
        ranks.say("go")
        assert ranks.hear() == [[0, 3, 2.0, 111.0], [1, 3, 0.0, 111.0], [2, 3, 1.0, 111.0]]


def wait_for_abort(seat: Seat, group: Group, source: int) -> None:
    """Wait in a receive that nobody serves while another thread aborts on order; say how and when it ended."""

    def obey() -> None:
        seat.hear()
        aborted_s = time.monotonic()
        group.abort()
        group.abort()
        seat.say(["aborted", aborted_s])

    work = group.recv(torch.empty(1000), source, 7)
    control = threading.Thread(target=obey)
    control.start()
    seat.say("waiting")
    kind, freed_s = timed(work.wait)
    control.join(WAIT_S)
    seat.say([kind, freed_s])


def test_an_abort_frees_every_rank_that_waits() -> None:
    """Ranks that wait for each other in a circle are all out as soon as other threads abort their groups."""

    def body(seat: Seat) -> None:
        seat.hear()
        group = seat.form(1, 3)
        wait_for_abort(seat, group, (seat.rank - 1) % 3)
        kind, _ = timed(lambda: around(group, 1.0))
        seat.say(kind)

    with team(3, body) as ranks:
        ranks.server.begin(1, 3)
        ranks.say("go")
        assert ranks.hear() == ["waiting"] * 3
        ranks.say("abort")
        aborted_s = [at_s for _, at_s in ranks.hear()]
        for rank, (kind, freed_s) in enumerate(ranks.hear()):
            assert kind in LEFT
            assert min(aborted_s) <= freed_s < max(aborted_s) + FREED_S, rank
        assert set(ranks.hear()) <= LEFT, "a group that was left cannot be used any more"


def test_one_ranks_abort_frees_those_that_wait_for_it() -> None:
    """The connections of an aborted group are shut down, so partners hear of it without any message."""

    def body(seat: Seat) -> None:
        seat.hear()
        group = seat.form(1, 3)
        if seat.rank == 0:
            seat.say("waiting")
            seat.hear()
            group.abort()
            seat.hear()  # it lives on: what frees the others is not its end
            return
        work = group.recv(torch.empty(1000), 0, 7)
        seat.say("waiting")
        kind, freed_s = timed(work.wait)
        seat.say([kind, freed_s])

    with team(3, body) as ranks:
        ranks.server.begin(1, 3)
        ranks.say("go")
        assert ranks.hear() == ["waiting"] * 3
        aborted_s = time.monotonic()
        ranks.say("abort", 0)
        for kind, freed_s in ranks.hear(1, 2):
            assert kind == "RuntimeError"
            assert freed_s < aborted_s + FREED_S
        ranks.say("end", 0)


def test_an_abort_frees_a_rank_in_the_middle_of_a_transfer() -> None:
    """A partner that is stopped while it sends keeps nobody: not even a receive that has begun, which gloo forgets."""

    def body(seat: Seat) -> None:
        seat.hear()
        group = seat.form(1, 2)
        size = 64 * 2**20
        if seat.rank == 1:
            work = group.send(torch.ones(size), 0, 7)
            os.kill(os.getpid(), signal.SIGSTOP)
            work.wait()
        work = group.recv(torch.zeros(size), 1, 7)

        def obey() -> None:
            seat.hear()
            group.abort()

        control = threading.Thread(target=obey)
        control.start()
        kind, freed_s = timed(work.wait)
        control.join(WAIT_S)
        seat.say([kind, freed_s])

    with team(2, body) as ranks:
        ranks.server.begin(1, 2)
        ranks.say("go")
        _, status = os.waitpid(ranks.pids[1], os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        aborted_s = time.monotonic()
        ranks.say("abort", 0)
        ((kind, freed_s),) = ranks.hear(0)
        assert kind in LEFT
        assert aborted_s < freed_s < aborted_s + FREED_S
        ranks.kill(1)


def test_survivors_of_a_kill_form_the_next_generation() -> None:
    """A rank is killed while all wait for each other; the others abort, meet again and exchange in a smaller world."""

    def body(seat: Seat) -> None:
        seat.hear()
        group = seat.form(1, 3)
        wait_for_abort(seat, group, (seat.rank - 1) % 3)
        rank = seat.hear()
        second = seat.form(2, 2, rank)
        seat.say(around(second, 10.0 + seat.rank))
        second.abort()
        seat.hear()
        seat.say(around(seat.form(3, 2, rank), 20.0 + seat.rank))

    with team(3, body) as ranks:
        ranks.server.begin(1, 3)
        ranks.say("go")
        assert ranks.hear() == ["waiting"] * 3
        ranks.kill(1)
        ranks.say("abort", 0, 2)
        ranks.hear(0, 2)
        for kind, _ in ranks.hear(0, 2):
            assert kind in LEFT
        ranks.server.begin(2, 2)
        ranks.lines[0].say(0)
        ranks.lines[2].say(1)
        assert ranks.hear(0, 2) == [12.0, 10.0]
        ranks.server.begin(3, 2)
        ranks.say("again", 0, 2)
        assert ranks.hear(0, 2) == [22.0, 20.0]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    return client, server


def talks(pair: tuple[socket.socket, socket.socket]) -> bool:
    """Whether bytes pass in both directions."""
    for source, target in (pair, pair[::-1]):
        source.settimeout(WAIT_S)
        target.settimeout(WAIT_S)
        with suppress(OSError):
            source.sendall(b"alive")
            if target.recv(5) == b"alive":
                continue
        return False
    return True


class Meanwhile(RendezvousStore):
    """Does something else in this process while the group is being built: when gloo asks for an address."""

    def __init__(self, rendezvous: Rendezvous, generation: int, act: Callable[[], None]) -> None:
        super().__init__(rendezvous, generation)
        self._act: Callable[[], None] | None = act

    def get(self, key: str) -> bytes:
        act, self._act = self._act, None
        if act is not None:
            act()
        return super().get(key)


def test_sockets_of_the_process_survive_an_abort() -> None:
    """What was connected before, or is disowned or local when opened meanwhile, works after an abort as before it."""

    def body(seat: Seat) -> None:
        seat.hear()
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
        pairs["listener"] = socket.create_connection(listeners[0].getsockname()), listeners[0].accept()[0]
        seat.say([kind, {name: talks(pair) for name, pair in pairs.items()}])
        for end in pairs["during"]:
            reown(end.fileno())

    with team(2, body) as ranks:
        ranks.server.begin(1, 2)
        ranks.say("go")
        names = ["before", "during", "local", "after", "listener"]
        for kind, alive in ranks.hear():
            assert kind in LEFT
            assert alive == dict.fromkeys(names, True)


def test_an_abort_leaves_other_groups_of_the_process_alone() -> None:
    """Leaving an old generation does not disturb the next one, which may be in use already."""

    def body(seat: Seat) -> None:
        seat.hear()
        first = seat.form(1, 2)
        seat.say("formed")
        seat.hear()
        second = seat.form(2, 2)
        first.abort()
        seat.say(around(second, float(seat.rank)))

    with team(2, body) as ranks:
        ranks.server.begin(1, 2)
        ranks.say("go")
        assert ranks.hear() == ["formed"] * 2
        ranks.server.begin(2, 2)
        ranks.say("go")
        assert ranks.hear() == [1.0, 0.0]


def open_sockets() -> set[str]:
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if link.startswith("socket:")}


@pytest.mark.parametrize("leave", ["abort", "close"])
def test_groups_that_were_left_hold_no_sockets(leave: str) -> None:
    """Generation after generation, none of the sockets that came with a group stays open."""

    def body(seat: Seat) -> None:
        before = open_sockets()
        for generation in (1, 2, 3):
            seat.hear()
            rendezvous = seat.rendezvous()
            store = RendezvousStore(rendezvous, generation)
            group = build(store, seat.rank, 2)
            around(group, 1.0)
            getattr(group, leave)()
            rendezvous.close()
            seat.say("left")
            seat.hear()  # gloo of the partner may still be in the exchange
            del group, store, rendezvous
            deadline_s = time.monotonic() + WAIT_S
            while more := open_sockets() - before:
                assert time.monotonic() < deadline_s, more
            seat.say("freed")

    with team(2, body) as ranks:
        for generation in (1, 2, 3):
            ranks.server.begin(generation, 2)
            ranks.say("go")
            assert ranks.hear() == ["left"] * 2
            ranks.say("free")
            assert ranks.hear() == ["freed"] * 2


def test_a_group_of_one_can_be_left() -> None:
    """A rank alone in its world has no connections, and abort does no harm."""

    def body(seat: Seat) -> None:
        seat.hear()
        group = seat.form(1, 1)
        total = torch.tensor([3.0])
        group.all_reduce(total).wait()
        group.abort()
        group.close()
        seat.say(float(total))

    with team(1, body) as ranks:
        ranks.server.begin(1, 1)
        ranks.say("go")
        assert ranks.hear() == [3.0]


# -- the rendezvous -----------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    """A server for this process alone."""
    started = Server()
    started.start()
    yield started
    started.stop()


def connect(server: Server, worker: str) -> Rendezvous:
    return Rendezvous(server.address, TOKEN, worker)


class Waiter:
    """A call in a thread of its own."""

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


def test_values_pass_whoever_comes_first(server: Server) -> None:
    """A key is given out as soon as it is put, whether it was asked for before or after; a store asks once."""
    server.begin(1, 2)
    first, second = connect(server, "a"), connect(server, "b")
    first.put(1, "early", b"\x00\xff")
    assert second.get(1, "early") == b"\x00\xff"
    waiter = Waiter(lambda: second.get(1, "late"))
    assert not waiter.ended.wait(0.1)
    first.put(1, "late", b"")
    assert waiter.ended.wait(WAIT_S)
    assert waiter.result == b""
    store = RendezvousStore(first, 1)
    store.set("text", "as bytes")
    RendezvousStore(second, 1).wait(["text", "early"])
    assert RendezvousStore(second, 1).get("text") == b"as bytes"


def test_an_exchange_gives_everybodys_value_by_rank(server: Server) -> None:
    """All wait for the last one, and then have the same values in the order of ranks, however they arrived."""
    server.begin(1, 3)
    lines = [connect(server, str(rank)) for rank in range(3)]
    waiters = []
    for rank in (2, 0):
        waiters.append(Waiter(partial(lines[rank].exchange, 1, "standing", rank, b"rank %d" % rank)))
        server.await_arrival("standing", {2, 0} if rank == 0 else {2})
    assert not any(waiter.ended.wait(0.05) for waiter in waiters)
    expected = (b"rank 0", b"rank 1", b"rank 2")
    assert lines[1].exchange(1, "standing", 1, b"rank 1") == expected
    for waiter in waiters:
        assert waiter.ended.wait(WAIT_S)
        assert waiter.result == expected


@pytest.mark.parametrize("call", ["get", "exchange"])
def test_an_interrupt_frees_the_waiter(server: Server, call: str) -> None:
    """A rank is missing: whoever waits for it is freed by another thread, and stays free in every later call."""
    server.begin(1, 2)
    rendezvous = connect(server, "a")

    def wait() -> Any:
        if call == "get":
            return rendezvous.get(1, "never")
        return rendezvous.exchange(1, "standing", 0, b"")

    waiter = Waiter(wait)
    assert not waiter.ended.wait(0.1)
    rendezvous.interrupt()
    rendezvous.interrupt()
    assert waiter.ended.wait(FREED_S)
    assert isinstance(waiter.error, GenerationSuperseded)
    with pytest.raises(GenerationSuperseded):
        wait()
    with pytest.raises(GenerationSuperseded):
        rendezvous.put(1, "key", b"")
    rendezvous.close()


@pytest.mark.parametrize("call", ["get", "exchange"])
def test_a_newer_generation_frees_those_who_wait_for_an_older_one(server: Server, call: str) -> None:
    """The coordinator answers every waiter of the old generation; late requests for it are answered at once."""
    server.begin(1, 3)
    lines = [connect(server, str(rank)) for rank in range(2)]

    def wait(rank: int) -> Any:
        if call == "get":
            return lines[rank].get(1, "never")
        return lines[rank].exchange(1, "standing", rank, b"")

    waiters = [Waiter(partial(wait, rank)) for rank in range(2)]
    assert not any(waiter.ended.wait(0.05) for waiter in waiters)
    server.begin(2, 2)
    for waiter in waiters:
        assert waiter.ended.wait(FREED_S)
        assert isinstance(waiter.error, GenerationSuperseded)
    with pytest.raises(GenerationSuperseded, match="generation 1 is over"):
        wait(0)
    lines[0].put(1, "key", b"of the old one")
    lines[0].put(2, "key", b"of the new one")
    assert lines[1].get(2, "key") == b"of the new one", "the connection can be used on, and old keys are fenced off"


def test_a_generation_starts_empty(server: Server) -> None:
    """Keys and arrivals of one generation are not seen in the next."""
    server.begin(1, 2)
    first, second = connect(server, "a"), connect(server, "b")
    first.put(1, "key", b"1")
    assert first.get(1, "key") == b"1"
    arrived = Waiter(lambda: first.exchange(1, "standing", 0, b"1"))
    server.await_arrival("standing", {0})
    server.begin(2, 2)
    assert arrived.ended.wait(WAIT_S)
    asked = Waiter(lambda: first.get(2, "key"))
    exchanged = Waiter(lambda: second.exchange(2, "standing", 1, b"2"))
    assert not asked.ended.wait(0.1)
    assert not exchanged.ended.is_set()
    connect(server, "c").put(2, "key", b"2")
    assert asked.ended.wait(WAIT_S)
    assert asked.result == b"2"
    assert connect(server, "d").exchange(2, "standing", 0, b"0") == (b"0", b"2")


def test_a_lost_coordinator_is_a_connection_error(server: Server) -> None:
    """Without an interrupt the end of the connection is what it is: the coordinator is gone."""
    server.begin(1, 2)
    rendezvous = connect(server, "a")
    waiter = Waiter(lambda: rendezvous.get(1, "never"))
    assert not waiter.ended.wait(0.1)
    server.stop()
    assert waiter.ended.wait(WAIT_S)
    assert isinstance(waiter.error, ConnectionError)


def test_a_stranger_is_refused(server: Server) -> None:
    """The store is behind the token, too."""
    server.begin(1, 1)
    with pytest.raises((Refused, ConnectionError)):
        Rendezvous(server.address, "another token", "a")


def test_an_interrupt_frees_a_rank_that_builds_a_group() -> None:
    """A partner never comes: the rank that waits for its address inside gloo is freed, and forms the next group."""

    def body(seat: Seat) -> None:
        seat.hear()
        rendezvous = seat.rendezvous()
        store = RendezvousStore(rendezvous, 1)

        def obey() -> None:
            seat.hear()
            seat.say(time.monotonic())
            rendezvous.interrupt()

        control = threading.Thread(target=obey)
        control.start()
        seat.say("building")
        kind, freed_s = timed(lambda: build(store, 0, 2))
        control.join(WAIT_S)
        seat.say([kind, freed_s])
        seat.hear()
        group = seat.form(2, 1)
        total = torch.tensor([3.0])
        group.all_reduce(total).wait()
        seat.say(float(total))

    with team(1, body) as ranks:
        ranks.server.begin(1, 2)
        ranks.say("go")
        assert ranks.hear() == ["building"]
        ranks.say("interrupt")
        (interrupted_s,) = ranks.hear()
        ((kind, freed_s),) = ranks.hear()
        assert kind == "GenerationSuperseded"
        assert freed_s < interrupted_s + FREED_S
        ranks.server.begin(2, 1)
        ranks.say("again")
        assert ranks.hear() == [3.0]
