"""A warm, single-threaded process that forks workers in 10 ms; imports would take seconds.

It has imported torch and the job and has used neither: no tensor arithmetic, no second thread, no
CUDA. (One multi-threaded operation in the parent would hang every child.)

As the parent of the workers it also notices first when a worker is stopped or ends. If forking is
switched off, it starts fresh interpreters by the same protocol.

-> agent/agent.py sends the orders and handles the reports. worker/process.py: the worker itself.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaoskit.job import JobSpec
from chaoskit.process.linux import (
    await_readable,
    die_with_parent,
    more_files,
    print_error,
    set_name,
)

_ORDER_BYTES_MAX = 65536
_DESCRIPTORS = 4


class Order(msgspec.Struct, frozen=True, tag=True):
    """The order of an agent to start a worker.

    It carries four descriptors: control socket, board, its bell, and a file with the worker's spec,
    which may be longer than a message.
    """

    worker: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The report that a worker was started as process ``pid``."""

    worker: str
    pid: int


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """The report that a worker was not started, for example for lack of processes or disk space.

    It also answers every order after :class:`Broken`.
    """

    worker: str
    error: str


class ChildChanged(msgspec.Struct, frozen=True, tag=True):
    """The report that a worker was stopped, or ended with a status or by a signal.

    The code is ``exited``, ``killed``, ``dumped`` or ``stopped``.
    """

    pid: int
    code: str
    status: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The report that the job is imported. No user code runs in the zygote itself from then on."""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The report that the job cannot be imported.

    Each order is then answered by :class:`NotStarted`.

    Attributes:
        refused: field, value and remedy if the error was BadInput.
    """

    error: str
    refused: tuple[str, str, str] | None = None


Report = Started | NotStarted | ChildChanged | Loaded | Broken
report_decoder = msgspec.json.Decoder(Report)
_order_decoder = msgspec.json.Decoder(Order)

_CODES = {
    os.CLD_EXITED: "exited",
    os.CLD_KILLED: "killed",
    os.CLD_DUMPED: "dumped",
    os.CLD_STOPPED: "stopped",
}


def order_worker(
    zygote: socket.socket, worker: str, spec: bytes, descriptors: Sequence[int]
) -> None:
    """Order a zygote to start ``worker``. Returns at once.

    Args:
        zygote: the connection to it; non-blocking.
        spec: a :class:`~chaoskit.runtime.worker.process.WorkerSpec`, as JSON.
        descriptors: control socket, board, and its bell.

    Raises:
        OSError: if the order was not sent: there is no room for it, or the zygote has ended.
    """
    with os.fdopen(os.memfd_create("ck-spec", os.MFD_CLOEXEC), "wb") as file:
        file.write(spec)
        file.flush()
        socket.send_fds(zygote, [msgspec.json.encode(Order(worker))], [*descriptors, file.fileno()])


def preload() -> None:
    """Import everything that workers need, including parts of torch that are loaded lazily."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.optim.lr_scheduler
    import torch.utils.data

    torch.set_num_threads(1)
    import chaoskit.runtime.worker.process  # noqa: F401
    from chaoskit.journal.writer import own_version
    from chaoskit.runtime.worker.sources import imported_sources

    own_version()  # cached: every worker journals it
    imported_sources()  # marks these modules as seen: none is user code


class Zygote:
    """The server of one agent over ``connection`` (SOCK_SEQPACKET)."""

    def __init__(self, connection: socket.socket, fork: bool) -> None:
        self._connection, self._fork = connection, fork
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pids: set[int] = set()
        self._import_error = ""  # the error with which the import of the job ended

    def load(self, job: JobSpec) -> None:
        """Import the modules that workers need, and the job, and report the outcome.

        The report is :class:`Loaded`, or :class:`Broken` for any exception.
        """
        try:
            preload()
            from chaoskit.runtime.worker.process import load_job

            faulthandler.enable()  # writes the place of a crash in an import to the log of the node
            load_job(job)
            faulthandler.disable()
        except BaseException as error:  # noqa: BLE001 - an import may also raise SystemExit
            from chaoskit.runtime.worker.failure import failure_of

            print_error(error)
            self._import_error, refused = failure_of(error, job.path)
            self.report(Broken(self._import_error, refused))
        else:
            self.report(Loaded())

    def serve(self) -> None:
        """Carry out orders, and report workers that end or stop, until the agent goes away.

        Raises:
            ConnectionError: if it goes away before a report is sent.
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        gc.freeze()
        while True:
            readable = await_readable([self._connection.fileno(), self._wake_r])
            if self._wake_r in readable:
                os.read(self._wake_r, 4096)
                self._reap()
            if self._connection.fileno() in readable and not self._handle_order():
                return

    def report(self, message: Report) -> None:
        """Send a report to the agent. Raise OSError if the agent is gone."""
        self._connection.send(msgspec.json.encode(message))

    def _reap(self) -> None:
        """Report every worker that was stopped or has ended since the last call."""
        options = os.WEXITED | os.WSTOPPED | os.WNOHANG
        while True:
            try:
                change = os.waitid(os.P_ALL, 0, options)
            except ChildProcessError:
                return
            if change is None:
                return
            if change.si_pid in self._pids:
                self.report(ChildChanged(change.si_pid, _CODES[change.si_code], change.si_status))

    def _handle_order(self) -> bool:
        """Receive and carry out one order, and report the worker or the reason why there is none.

        Return False if the agent is gone.
        """
        data, descriptors, flags, _ = socket.recv_fds(
            self._connection, _ORDER_BYTES_MAX, _DESCRIPTORS
        )
        if not data:
            return False
        worker = _order_decoder.decode(data).worker
        try:
            if self._import_error:
                self.report(NotStarted(worker, f"the job cannot be imported: {self._import_error}"))
                return True
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, more_files())
            pid = self._start(descriptors)
        except OSError as error:
            self.report(NotStarted(worker, f"{type(error).__name__}: {error}"))
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._pids.add(pid)
        self.report(Started(worker, pid))
        return True

    def _start(self, descriptors: list[int]) -> int:
        """Start a worker with its log, and return its process id.

        Args:
            descriptors: control socket, board, its bell, and the file with the spec.

        Raises:
            OSError: if it cannot be started.
        """
        *own_descriptors, spec = descriptors
        log = _open_log(_read(spec))
        try:
            return (
                self._fork_worker(spec, own_descriptors, log)
                if self._fork
                else _spawn(spec, own_descriptors, log)
            )
        finally:
            os.close(log)

    def _fork_worker(self, spec: int, descriptors: list[int], log: int) -> int:
        """Fork a worker.

        Returns its process id in the zygote, and does not return in the worker.
        """
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with_parent(zygote_pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(log, 1)
            os.dup2(log, 2)
            self._connection.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
            from chaoskit.runtime.worker.process import WorkerSpec, run_worker

            worker_spec = msgspec.json.decode(_read(spec), type=WorkerSpec)
            os.close(spec)
            run_worker(worker_spec, *descriptors)
        except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(1)


def _read(file: int) -> bytes:
    """Return the whole content of a file, given its descriptor."""
    return os.pread(file, os.fstat(file).st_size, 0)


def _open_log(spec: bytes) -> int:
    """Open the log of the worker that ``spec`` describes, and return its descriptor."""
    fields = msgspec.json.decode(spec)
    directory = Path(fields["run_directory"]) / "log"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{fields['journal']}.log"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _spawn(spec: int, descriptors: list[int], log: int) -> int:
    """Start a worker in a fresh interpreter, and return its process id.

    This is for platforms and jobs that cannot fork.
    """
    launcher = (
        "import sys; from chaoskit.process.linux import die_with_parent; die_with_parent(int(sys.argv.pop(1)));"
        "from chaoskit.runtime.worker.process import main; main(sys.argv[1:])"
    )
    os.lseek(spec, 0, os.SEEK_SET)
    child = subprocess.Popen(
        [sys.executable, "-c", launcher, str(os.getpid()), *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=spec,  # it holds the token, which a command line would show to all processes
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    child.returncode = 0  # _reap collects it, not Popen
    return child.pid


def run_zygote(connection: socket.socket, agent_pid: int, job: JobSpec, fork: bool) -> None:
    """Run a zygote process: import the job and serve the agent, then exit. Does not return.

    Args:
        fork: False to start each worker as a fresh interpreter, which imports the job itself.
    """
    die_with_parent(agent_pid)
    set_name("ck-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    zygote = Zygote(connection, fork)
    exit_status = 1
    try:
        if fork:
            zygote.load(job)
        zygote.serve()
        exit_status = 0
    except ConnectionError:
        exit_status = 0  # the agent is gone, and the workers end as well
    except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happened
        print_error(error)
    finally:
        os._exit(exit_status)
