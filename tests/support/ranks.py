"""Processes that run a function of a test, and exchange messages with the test.

They are forked by a server that has torch imported and a single thread, not by the process that
runs pytest. In that process, a lock that another thread (of a server under test, of xdist) holds at
the moment of a fork would stay locked in the child for ever. A rank inherits nothing of its test:
each input is an argument, and every argument is pickled. Descriptors are passed by
``multiprocessing.reduction.DupFd``, shared numbers by :func:`counters`.

The server ends with the process that runs pytest, and every rank ends with the server, whatever
kills them.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from chaoskit.process import linux
from support.waiting import LIMIT_S, wait_until

_context = multiprocessing.get_context("forkserver")
_PRELOADED = "support.rank_server"
#: Kinds of messages of a rank: a message of its body, the body's result, the traceback of its
#: error.
_SAID, _RETURNED, _FAILED = "said", "returned", "failed"


class RankEnded(AssertionError):
    """The rank has ended, by itself or by a signal, and left no more messages."""


class Line:
    """The first argument of a rank's body: its number, the number of ranks, and its connection to
    the test.
    """

    def __init__(self, rank: int, size: int, connection: Connection) -> None:
        self.rank, self.size = rank, size
        self.connection = connection

    def send(self, value: Any) -> None:
        self.connection.send((_SAID, value))

    def receive(self) -> Any:
        """Return what the test sent. A rank waits without a limit, because its test has a limit."""
        return self.connection.recv()


Body = Callable[..., Any]
Counters = Any


class Rank:
    """The test's side of a process that runs a body."""

    def __init__(self, number: int, size: int, body: Body, arguments: tuple[Any, ...]) -> None:
        self.number = number
        self.killed = False
        self.connection, connection_of_rank = _context.Pipe()
        self._stack = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by destroy()
        bound = (
            _Loaded(body),
            Line(number, size, connection_of_rank),
            DupFd(self._stack.fileno()),
            arguments,
        )
        self._process = _context.Process(target=_run, args=bound, daemon=True)
        self._process.start()
        connection_of_rank.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send(self, value: Any) -> None:
        self.connection.send(value)

    def receive(self, *, limit_s: float = LIMIT_S) -> Any:
        """Return the next value that the rank sent.

        Raises:
            RankEnded: if it has ended.
            AssertionError: if it failed, with its traceback; if it sent nothing within ``limit_s``,
                with the stacks of its threads. It is ended then.
        """
        kind, value = self._next(limit_s)
        assert kind == _SAID, (
            f"rank {self.number} returned {value!r}, and was expected to send something"
        )
        return value

    def result(self) -> Any:
        """Return the body's result. The rank must have nothing more to send."""
        kind, value = self._next()
        assert kind == _RETURNED, f"rank {self.number} sent {value!r}, and was expected to return"
        return value

    def rest(self) -> list[Any]:
        """Return all values that the rank sent before it ended without a result."""
        values = []
        try:
            while True:
                values.append(self.receive())
        except RankEnded:
            return values

    def _next(self, limit_s: float = LIMIT_S) -> tuple[str, Any]:
        if not self.connection.poll(limit_s):
            raise _late([self], "a message", limit_s)
        try:
            kind, value = self.connection.recv()
        except (
            EOFError,
            OSError,
        ):  # at the end of the stream, in the middle of a message or between two
            raise RankEnded(f"rank {self.number} has ended, exit code {self.wait()}") from None
        assert kind != _FAILED, f"rank {self.number} failed:\n{value}"
        return kind, value

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL, without waiting for the end."""
        self.killed = True
        self.signal(signal.SIGKILL)

    def end_and_tell_stack(self) -> str:
        """End the rank, and return the stacks of its threads."""
        self._process.terminate()
        self._process.join(LIMIT_S)
        self._stack.seek(0)
        return f"rank {self.number}:\n{self._stack.read()}"

    def await_state(self, state: str) -> None:
        """Wait until the kernel shows the process in this state, such as "T" after SIGSTOP."""
        wait_until(lambda: linux.state(self.pid) == state, f"state {state} of rank {self.number}")

    def wait(self) -> int:
        """Return the exit code, negative for a signal."""
        self._process.join(LIMIT_S)
        assert self._process.exitcode is not None, (
            f"not within {LIMIT_S:g} s: the end of rank {self.number}"
        )
        return self._process.exitcode

    def destroy(self) -> None:
        """End the rank in any state, and free its resources in this process."""
        if self._process.exitcode is None:
            self._process.kill()  # it may have ended, and the server, its parent, not yet have told the exit code
            self.wait()
        self.connection.close()
        self._stack.close()
        self._process.close()


class Ranks(list[Rank]):
    """Ranks 0 to n - 1 that run one body."""

    def send(self, value: Any, *ranks: int) -> None:
        """Send a value to some ranks, or to all."""
        for rank in ranks or range(len(self)):
            self[rank].send(value)

    def receive(self, *ranks: int) -> list[Any]:
        """Return the next value of each of some ranks, or of all."""
        return [self[rank].receive() for rank in ranks or range(len(self))]

    def kill(self, rank: int) -> None:
        self[rank].kill()

    def end(self) -> None:
        """Wait for all ranks. Each must have returned from its body, except those that the test has
        killed.
        """
        for rank in _as_they_end([rank for rank in self if not rank.killed]):
            rank.result()
            assert rank.wait() == 0
        for rank in self:
            assert not rank.killed or rank.wait() == -signal.SIGKILL

    def destroy(self) -> None:
        for rank in self:
            rank.destroy()


def start(count: int, body: Body, *arguments: Any) -> Ranks:
    """Start ranks that run ``body(line, *arguments)``, a function of a module.

    The caller must destroy them.
    """
    _start_server()
    started = Ranks()
    try:
        for number in range(count):
            started.append(Rank(number, count, body, arguments))
    except BaseException:
        started.destroy()
        raise
    return started


@contextmanager
def running(count: int, body: Body, *arguments: Any) -> Iterator[Ranks]:
    """Run ``body`` on ranks while the context lasts; it must end without an error."""
    started = start(count, body, *arguments)
    try:
        yield started
        started.end()
    finally:
        started.destroy()


@contextmanager
def one(body: Body, *arguments: Any) -> Iterator[Rank]:
    """Run ``body`` in one process. It may end in any way, and is gone after the context."""
    (started,) = start(1, body, *arguments)
    try:
        yield started
    finally:
        started.destroy()


def results(count: int, body: Body, *arguments: Any) -> list[Any]:
    """Run ``body`` on ranks, and return its results; the result of a rank ended by a signal is its
    negative exit code.

    The first error of a rank is raised as the error of the test: other ranks may wait for this
    rank.
    """
    started = start(count, body, *arguments)
    try:
        by_number = {rank.number: _result(rank) for rank in _as_they_end(started)}
        return [by_number[rank.number] for rank in started]
    finally:
        started.destroy()


def _as_they_end(ranks: Sequence[Rank]) -> Iterator[Rank]:
    """Yield ranks in the order in which they end, so that the first error is the test's: others may
    wait for that rank.
    """
    pending = {rank.connection: rank for rank in ranks}
    while pending:
        ready = wait(list(pending), LIMIT_S)
        if not ready:
            raise _late(pending.values(), "a result", LIMIT_S)
        for connection in ready:
            yield pending.pop(connection)


def _late(ranks: Iterable[Rank], what: str, limit_s: float) -> AssertionError:
    stacks = "\n".join(rank.end_and_tell_stack() for rank in ranks)
    return AssertionError(
        f"not within {limit_s:g} s: {what} of these ranks, which were here:\n{stacks}"
    )


def _result(rank: Rank) -> Any:
    try:
        return rank.result()
    except RankEnded:
        if (code := rank.wait()) < 0:
            return code
        raise


def counters(count: int) -> Counters:
    """Return 64-bit numbers in shared memory, initially 0: an argument that outlives a
    killed rank.
    """
    return _context.RawArray("q", count)


# -- the server ------------------------------------------------------------------------------------


def _start_server() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "start ranks on the main thread: the server ends with the thread that started it"
        )
    forkserver.set_forkserver_preload([_PRELOADED])
    # Preloaded modules are found by PYTHONPATH only; one thread for each library keeps a fork safe.
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    environment["CHAOSKIT_RANKS_OF"] = str(
        os.getpid()
    )  # the server ends at once if this process has ended
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- the rank --------------------------------------------------------------------------------------


class _Loaded:
    """A function that is found in a module under the name that pytest gave it, wherever its file
    lies.
    """

    def __init__(self, body: Body) -> None:
        self._body = body

    def __call__(self, *arguments: Any) -> Any:
        return self._body(*arguments)

    def __reduce__(self) -> Any:
        path = sys.modules[self._body.__module__].__file__
        assert path is not None
        return _load, (self._body.__module__, path, self._body.__qualname__)


def _load(module: str, path: str, name: str) -> Body:
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, Path(path))
        assert spec is not None
        assert spec.loader is not None
        parts = module.split(".")
        for package in (".".join(parts[:count]) for count in range(1, len(parts))):
            if (
                package not in sys.modules
            ):  # as pytest does it: pickle looks up the first part of a name
                sys.modules[package] = types.ModuleType(package)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    body: Any = sys.modules[module]
    for part in name.split("."):
        body = getattr(body, part)
    return body


def _run(body: Body, line: Line, stack: DupFd, arguments: tuple[Any, ...]) -> None:
    """Run the body of a rank, and end without the interpreter's shutdown: gloo complains about
    remaining groups.
    """
    code = 1
    try:
        server = sys.modules.get(_PRELOADED)
        assert server is not None, f"the fork server could not import {_PRELOADED}"
        linux.die_with_parent(server.PID)
        assert len(os.listdir("/proc/self/task")) == 1, "forked from a process with threads"
        faulthandler.register(
            signal.SIGTERM, file=stack.detach(), chain=True
        )  # chain: and end by it
        line.connection.send((_RETURNED, body(line, *arguments)))
        code = 0
    except BaseException:  # noqa: BLE001 - shown by the test
        try:
            line.connection.send((_FAILED, traceback.format_exc()))
        except OSError:  # the test is gone
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
