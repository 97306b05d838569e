"""A warm, single-threaded process that forks workers: 10 ms instead of the seconds that imports take.

It has imported torch and the job and has done nothing with them: no tensor arithmetic, no second thread, no CUDA. (One
multi-threaded operation in the parent would hang every child.) As the parent of the workers it also hears first when
one is stopped, and how one ended. Where forking is switched off it starts fresh interpreters, by the same protocol.
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
    """Agent to zygote: start a worker.

    Carries four descriptors: control socket, board, its bell, and a file with the worker's spec. That may be longer
    than a message.
    """

    worker: str


class Started(msgspec.Struct, frozen=True, tag=True):
    worker: str
    pid: int


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """This node cannot start the worker now: it may have no process left, or no room for a log."""

    worker: str
    error: str


class ChildChanged(msgspec.Struct, frozen=True, tag=True):
    """A worker ended (``code`` exited, killed or dumped, with status or signal) or was stopped."""

    pid: int
    code: str
    status: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The job is imported: from now on no code of the user runs in the zygote itself."""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The job cannot be imported. Each order is answered by :class:`NotStarted` from now on.

    ``refused`` holds field, value and remedy where the error was BadInput.
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
    """Have a zygote start ``worker``. Returns at once.

    Args:
        zygote: the connection to it; non-blocking.
        spec: a :class:`~chaoskit.runtime.worker.process.WorkerSpec`, as JSON.
        descriptors: control socket, board, and its bell.

    Raises:
        OSError: if the order was not given: there is no room for it, or the zygote has ended.
    """
    with os.fdopen(os.memfd_create("ck-spec", os.MFD_CLOEXEC), "wb") as file:
        file.write(spec)
        file.flush()
        socket.send_fds(zygote, [msgspec.json.encode(Order(worker))], [*descriptors, file.fileno()])


def preload() -> None:
    """Import what every worker needs; torch loads some of it lazily, at the worst moment."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.optim.lr_scheduler
    import torch.utils.data

    torch.set_num_threads(1)
    import chaoskit.runtime.worker.process  # noqa: F401
    from chaoskit.journal.writer import own_version
    from chaoskit.runtime.worker.sources import imported_sources

    own_version()  # of which every worker tells
    imported_sources()  # none of these is the user's: workers need not look at them again


class Zygote:
    """Serves one agent over ``connection`` (SOCK_SEQPACKET)."""

    def __init__(self, connection: socket.socket, fork: bool) -> None:
        self._connection, self._fork = connection, fork
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pids: set[int] = set()
        self._broken_by = ""  # the error with which the import of the job ended

    def load(self, job: JobSpec) -> None:
        """Import what workers need, and the job. An exception of the job is reported, whatever it is."""
        try:
            preload()
            from chaoskit.runtime.worker.process import load_job

            faulthandler.enable()  # where an import crashes is in the log of the node
            load_job(job)
            faulthandler.disable()
        except BaseException as error:  # noqa: BLE001 - an import may also raise SystemExit
            from chaoskit.runtime.worker.failure import failure_of

            print_error(error)
            self._broken_by, refused = failure_of(error, job.path)
            self.report(Broken(self._broken_by, refused))
        else:
            self.report(Loaded())

    def serve(self) -> None:
        """Until the agent goes away."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        gc.freeze()
        while True:
            readable = await_readable([self._connection.fileno(), self._wake_r])
            if self._wake_r in readable:
                os.read(self._wake_r, 4096)
                self._reap()
            if self._connection.fileno() in readable and not self._obey():
                return

    def report(self, message: Report) -> None:
        self._connection.send(msgspec.json.encode(message))

    def _reap(self) -> None:
        options = os.WEXITED | os.WSTOPPED | os.WNOHANG
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, options)
            except ChildProcessError:
                return
            if found is None:
                return
            if found.si_pid in self._pids:
                self.report(ChildChanged(found.si_pid, _CODES[found.si_code], found.si_status))

    def _obey(self) -> bool:
        data, descriptors, flags, _ = socket.recv_fds(
            self._connection, _ORDER_BYTES_MAX, _DESCRIPTORS
        )
        if not data:
            return False
        worker = _order_decoder.decode(data).worker
        try:
            if self._broken_by:
                self.report(NotStarted(worker, f"the job cannot be imported: {self._broken_by}"))
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
        *ours, spec = descriptors
        log = _open_log(_read(spec))
        try:
            return self._fork_worker(spec, ours, log) if self._fork else _spawn(spec, ours, log)
        finally:
            os.close(log)

    def _fork_worker(self, spec: int, descriptors: list[int], log: int) -> int:
        me = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with_parent(me)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(log, 1)
            os.dup2(log, 2)
            self._connection.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
            from chaoskit.runtime.worker.process import WorkerSpec, run_worker

            told = msgspec.json.decode(_read(spec), type=WorkerSpec)
            os.close(spec)
            run_worker(told, *descriptors)
        except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(1)


def _read(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _open_log(spec: bytes) -> int:
    fields = msgspec.json.decode(spec)
    directory = Path(fields["run_directory"]) / "log"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{fields['journal']}.log"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _spawn(spec: int, descriptors: list[int], log: int) -> int:
    """A worker in a fresh interpreter, for platforms and jobs that cannot be forked."""
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
    """The life of a zygote process. Does not return."""
    die_with_parent(agent_pid)
    set_name("ck-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    zygote = Zygote(connection, fork)
    code = 1
    try:
        if fork:
            zygote.load(job)
        zygote.serve()
        code = 0
    except ConnectionError:
        code = 0  # the agent is gone, and so are the workers soon
    except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happened
        print_error(error)
    finally:
        os._exit(code)
