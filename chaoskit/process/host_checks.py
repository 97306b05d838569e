"""Requirements of a run on this machine: free ports, writable directories, CUDA devices.

-> health/examine.py: the health of a node, which is checked again during a run; config.py: settings
that are wrong on every machine.
"""

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
    """Raise BadInput if ``port`` cannot be bound on ``host``, or is no port.

    Port 0 lets the system choose and is always free.

    Args:
        field: name of the setting, for the error.
    """
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
    """Raise BadInput for a directory that cannot be written to or created. Nothing is left there.

    Args:
        field: name of the setting, for the error.
    """
    if "\0" in str(directory):
        raise BadInput(field, str(directory), "use a path without NUL")
    existing_directory = directory
    while not existing_directory.exists() and existing_directory != existing_directory.parent:
        existing_directory = existing_directory.parent
    try:
        with tempfile.TemporaryFile(dir=existing_directory):
            pass
    except OSError as error:
        raise BadInput(
            field, str(directory), f"choose a directory that can be written ({error.strerror})"
        ) from None


def require_file_size() -> None:
    """Raise BadInput if journals, logs or copies would soon exceed the limit of file sizes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < _FILE_BYTES_LEAST:
        remedy = (
            "allow larger files (`ulimit -f unlimited`): "
            f"a run needs files of up to {_FILE_BYTES_LEAST // 2**20} MiB"
        )
        raise BadInput("ulimit -f", f"{limit} bytes", remedy)


def user_directory(variable: str, below_home: str) -> Path:
    """Return the directory of chaoskit below that of an XDG variable. It is not created.

    Args:
        variable: environment variable with a directory.
        below_home: directory below the user's home that is used if the variable is not set.

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
    """Raise BadInput on a machine with fewer CUDA devices than ``nodes``."""
    import torch

    devices = torch.cuda.device_count()
    if devices < nodes:
        raise BadInput(
            "device",
            "cuda",
            f"this machine has {devices} CUDA devices for {nodes} nodes; use device='cpu'",
        )


def on_thread(ask: Callable[[], Answer]) -> Future[Answer]:
    """Call ``ask`` on a thread that does not keep the process alive, and return its future result.

    The future has the exception if ``ask`` raises one. A disk that hangs then blocks nothing else.
    """
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - raised at the caller
            answer.set_exception(error)

    threading.Thread(target=work, name="ck-answer", daemon=True).start()
    return answer


def answer_within(limit_s: float, ask: Callable[[], Answer]) -> Answer:
    """Return what ``ask`` returns on a thread, or raise what it raises.

    Raises:
        TimeoutError: after ``limit_s`` seconds, while the thread goes on. It is an OSError, like
            the error of a failing disk.
    """
    answer = on_thread(ask)
    try:
        return answer.result(limit_s)
    except TimeoutError:
        if answer.done():
            raise
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
