"""The process of a FUSE file system that is mounted over one of a node's directories.

It is started in the mount namespace of the node, so that only the node sees it, and it vanishes
with the node. All files that the node's processes open there from then on pass through it, one
operation after the other, as with a single disk. Operations are passed on unless a trouble affects
them.

-> ``core/disk.py``: which operations a trouble affects. ``disk/disks.py``: when it is mounted.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from mfusepy import FUSE, FuseOSError, Operations

from chaoskit.process.linux import restore_signals, set_name
from chaoskit.substrate.core.disk import DiskTroubles, Operation
from chaoskit.substrate.disk.disks import (
    CountDiskTrouble,
    DiskTroubleDone,
    ImposeDiskTrouble,
    LiftDiskTrouble,
    Request,
)
from chaoskit.substrate.helper_process import BYTES_MAX, take_launcher_socket

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_STAT = (
    "st_atime_ns",
    "st_ctime_ns",
    "st_mtime_ns",
    "st_gid",
    "st_mode",
    "st_nlink",
    "st_size",
    "st_uid",
    "st_ino",
)
_STATFS = (
    "f_bavail",
    "f_bfree",
    "f_blocks",
    "f_bsize",
    "f_favail",
    "f_ffree",
    "f_files",
    "f_frsize",
    "f_namemax",
)


class _Directory(Operations):  # type: ignore[misc]  # mfusepy has no types
    """File system that passes operations on to a directory unless a trouble affects them."""

    use_ns = True

    def __init__(self, root: int, troubles: DiskTroubles, mounted: threading.Event) -> None:
        self._root, self._troubles, self._mounted = root, troubles, mounted

    def _apply_troubles(self, operation: Operation, size_bytes: int = 0) -> None:
        """Delay an operation as the troubles demand. Raises FuseOSError if they let it fail.

        A failing operation is delayed first, too.
        """
        error, delay_ms = self._troubles.rule(operation, size_bytes)
        if delay_ms:
            time.sleep(delay_ms / 1e3)
        if error:
            raise FuseOSError(error)

    def _path(self, path: str) -> str:
        """Return a path of FUSE relative to the directory below the mount."""
        return path.lstrip("/") or "."

    def init(self, path: str) -> None:
        self._mounted.set()

    # -- lookups -----------------------------------------------------------------------------------

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.stat(self._path(path), dir_fd=self._root, follow_symlinks=False)
        return {name.removesuffix("_ns"): getattr(status, name) for name in _STAT}

    def readdir(self, path: str, fh: int) -> Iterable[str]:
        self._apply_troubles("read")
        directory = os.open(self._path(path), os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root)
        try:
            return [".", "..", *os.listdir(directory)]
        finally:
            os.close(directory)

    def readlink(self, path: str) -> str:
        return os.readlink(self._path(path), dir_fd=self._root)

    def statfs(self, path: str) -> dict[str, int]:
        """Return the statistics of the disk.

        A full disk has no free blocks, for programs that look before they write.
        """
        status = os.fstatvfs(self._root)
        statistics = {name: getattr(status, name) for name in _STATFS}
        if self._troubles.room_bytes < math.inf:
            blocks = int(self._troubles.room_bytes // status.f_frsize)
            statistics |= {name: min(statistics[name], blocks) for name in ("f_bfree", "f_bavail")}
        return statistics

    # -- files -------------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            self._apply_troubles("change")
        # the kernel passes offsets itself, and its buffers are not aligned for O_DIRECT
        return os.open(self._path(path), flags & ~(os.O_APPEND | os.O_DIRECT), dir_fd=self._root)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._apply_troubles("change")
        return os.open(
            self._path(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode, dir_fd=self._root
        )

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._apply_troubles("read", size)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._apply_troubles("write", len(data))
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._apply_troubles("change")
        opened = os.open(self._path(path), os.O_WRONLY, dir_fd=self._root) if fh is None else fh
        try:
            os.ftruncate(opened, length)
        finally:
            if fh is None:
                os.close(opened)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._apply_troubles("sync")
        (os.fdatasync if datasync else os.fsync)(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    # -- names -------------------------------------------------------------------------------------

    def mkdir(self, path: str, mode: int) -> None:
        self._apply_troubles("change")
        os.mkdir(self._path(path), mode, dir_fd=self._root)

    def rmdir(self, path: str) -> None:
        self._apply_troubles("change")
        os.rmdir(self._path(path), dir_fd=self._root)

    def unlink(self, path: str) -> None:
        self._apply_troubles("change")
        os.unlink(self._path(path), dir_fd=self._root)

    def rename(self, old: str, new: str) -> None:
        self._apply_troubles("change")
        os.rename(self._path(old), self._path(new), src_dir_fd=self._root, dst_dir_fd=self._root)

    def symlink(self, target: str, source: str) -> None:
        self._apply_troubles("change")
        os.symlink(source, self._path(target), dir_fd=self._root)

    def link(self, target: str, source: str) -> None:
        self._apply_troubles("change")
        os.link(
            self._path(source), self._path(target), src_dir_fd=self._root, dst_dir_fd=self._root
        )

    def chmod(self, path: str, mode: int) -> None:
        self._apply_troubles("change")
        os.chmod(self._path(path), mode, dir_fd=self._root)

    def chown(self, path: str, uid: int, gid: int) -> None:
        self._apply_troubles("change")
        os.chown(self._path(path), uid, gid, dir_fd=self._root, follow_symlinks=False)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        self._apply_troubles("change")
        os.utime(
            self._path(path),
            ns=times or (time.time_ns(),) * 2,
            dir_fd=self._root,
            follow_symlinks=False,
        )


def _serve(connection: socket.socket, troubles: DiskTroubles, mounted: threading.Event) -> None:
    """Answer the launcher until it goes away, then end the process, as nothing uses the disk then.

    Nothing is answered before the file system is mounted.
    """
    mounted.wait()
    try:
        _answer_all(connection, troubles)
    finally:
        os._exit(0)


def _answer_all(connection: socket.socket, troubles: DiskTroubles) -> None:
    """Report to the launcher that the disk is ready, and carry out its requests."""
    _answer(connection, DiskTroubleDone())
    while data := connection.recv(BYTES_MAX):
        match _requests.decode(data):
            case ImposeDiskTrouble(trouble):
                _answer(connection, DiskTroubleDone(troubles.impose(trouble)))
            case LiftDiskTrouble(number):
                _answer(connection, DiskTroubleDone(number, troubles.lift(number)))
            case CountDiskTrouble(number):
                _answer(connection, DiskTroubleDone(number, troubles.affected_count(number)))


def _answer(connection: socket.socket, answer: DiskTroubleDone) -> None:
    connection.send(msgspec.json.encode(answer))


def main() -> None:
    """Mount the file system and serve it until the launcher goes away: the entry point.

    The directory is the only argument; the launcher's socket is standard input.
    """
    set_name("ck-disk")
    restore_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = take_launcher_socket()
    directory = Path(sys.argv[1])
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)  # the directory below the mount
    troubles, mounted = DiskTroubles(), threading.Event()
    threading.Thread(target=_serve, args=(connection, troubles, mounted), daemon=True).start()
    operations = _Directory(root, troubles, mounted)
    FUSE(operations, str(directory), foreground=True, fsname="chaoskit", nothreads=True)


if __name__ == "__main__":
    main()
