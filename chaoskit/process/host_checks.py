"""Requirements of a run on this machine: free ports, directories that can be written, CUDA devices."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from chaoskit.errors import BadInput

Answer = TypeVar("Answer")
_FILE_BYTES_LEAST = 64 * 2**20


def require_free_port(field: str, host: str, port: int) -> None:
    """Refuse a port that another process listens on. 0 lets the system choose and is always free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError:
            raise BadInput(field, port, "choose a port from 1 to 65535, or 0 for any") from None
        except OSError as error:
            raise BadInput(
                field, port, f"choose a free port, or 0 for any ({error.strerror})"
            ) from None


def require_writable(field: str, directory: Path) -> None:
    """Refuse a directory that cannot be written, or made. Nothing is left there.

    Raises:
        BadInput: naming the field.
    """
    if "\0" in str(directory):
        raise BadInput(field, str(directory), "use a path without NUL")
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise BadInput(
            field, str(directory), f"choose a directory that can be written ({error.strerror})"
        ) from None


def require_file_size() -> None:
    """Refuse a limit of the size of files that journals, logs and copies of the state would soon meet.

    Raises:
        BadInput: naming the limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < _FILE_BYTES_LEAST:
        remedy = f"raise the limit of the size of files, `ulimit -f unlimited`: a run needs {_FILE_BYTES_LEAST} bytes"
        raise BadInput("ulimit -f", f"{limit} bytes", remedy)


def user_directory(variable: str, below_home: str) -> Path:
    """Return chaoskit's own directory below the one that an XDG variable names, by default one in the user's home.

    Raises:
        BadInput: naming the variable, if it is not set and the user has no home.
    """
    if base := os.environ.get(variable):
        return Path(base) / "chaoskit"
    try:
        return Path.home() / below_home / "chaoskit"
    except RuntimeError:
        remedy = (
            f"set it to a directory that can be written: user {os.getuid()} has no home directory"
        )
        raise BadInput(variable, "", remedy) from None


def require_cuda(nodes: int) -> None:
    """Refuse a machine with fewer CUDA devices than ``nodes``."""
    import torch

    found = torch.cuda.device_count()
    if found < nodes:
        raise BadInput(
            "device",
            "cuda",
            f"this machine has {found} CUDA devices for {nodes} nodes; use device='cpu'",
        )


def on_thread(ask: Callable[[], Answer]) -> Future[Answer]:
    """Call ``ask`` on a thread that does not keep the process alive: a disk that hangs holds up nothing else."""
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            answer.set_exception(error)

    threading.Thread(target=work, name="ck-answer", daemon=True).start()
    return answer


def answer_within(limit_s: float, ask: Callable[[], Answer]) -> Answer:
    """Return what ``ask`` returns on a thread, or raise what it raises.

    Raises:
        TimeoutError: after ``limit_s``. It is an OSError, as of a disk that fails.
    """
    answer = on_thread(ask)
    try:
        return answer.result(limit_s)
    except TimeoutError:
        if answer.done():
            raise
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
