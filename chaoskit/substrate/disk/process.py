"""The process that stands between a node and one of its directories: a FUSE file system over what is there.

It is started in the mount namespace of the node, so only the node sees it, and it vanishes with the node. Whatever the
node's processes open there from then on passes through it, one operation after the other, as with a single disk; it
hands everything on, but for what is wrong.
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
from chaoskit.substrate.core.disk import Ailments, Operation
from chaoskit.substrate.disk.disks import CountTrouble, Done, ImposeTrouble, LiftTrouble, Request
from chaoskit.substrate.helper_process import BYTES_MAX, serve_launcher

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
    """Passes everything on to the directory that was there before, unless the disk is troubled."""

    use_ns = True

    def __init__(self, root: int, ailments: Ailments, mounted: threading.Event) -> None:
        self._root, self._ailments, self._mounted = root, ailments, mounted

    def _meet(self, operation: Operation, size_bytes: int = 0) -> None:
        number, delay_ms = self._ailments.rule(operation, size_bytes)
        if delay_ms:
            time.sleep(delay_ms / 1e3)
        if number:
            raise FuseOSError(number)

    def _path(self, path: str) -> str:
        return path.lstrip("/") or "."

    def init(self, path: str) -> None:
        self._mounted.set()

    # -- what is there --------------------------------------------------------------------------------------------

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.stat(self._path(path), dir_fd=self._root, follow_symlinks=False)
        return {name.removesuffix("_ns"): getattr(found, name) for name in _STAT}

    def readdir(self, path: str, fh: int) -> Iterable[str]:
        self._meet("read")
        directory = os.open(self._path(path), os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root)
        try:
            return [".", "..", *os.listdir(directory)]
        finally:
            os.close(directory)

    def readlink(self, path: str) -> str:
        return os.readlink(self._path(path), dir_fd=self._root)

    def statfs(self, path: str) -> dict[str, int]:
        """A disk without room says so to those that look before they write."""
        found = os.fstatvfs(self._root)
        told = {name: getattr(found, name) for name in _STATFS}
        if self._ailments.room_bytes < math.inf:
            blocks = int(self._ailments.room_bytes // found.f_frsize)
            told |= {name: min(told[name], blocks) for name in ("f_bfree", "f_bavail")}
        return told

    # -- files ----------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            self._meet("change")
        # the kernel says where to write, and what comes from it is not aligned as O_DIRECT wants it
        return os.open(self._path(path), flags & ~(os.O_APPEND | os.O_DIRECT), dir_fd=self._root)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._meet("change")
        return os.open(
            self._path(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode, dir_fd=self._root
        )

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._meet("read", size)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._meet("write", len(data))
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._meet("change")
        opened = os.open(self._path(path), os.O_WRONLY, dir_fd=self._root) if fh is None else fh
        try:
            os.ftruncate(opened, length)
        finally:
            if fh is None:
                os.close(opened)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._meet("sync")
        (os.fdatasync if datasync else os.fsync)(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    # -- names ----------------------------------------------------------------------------------------------------

    def mkdir(self, path: str, mode: int) -> None:
        self._meet("change")
        os.mkdir(self._path(path), mode, dir_fd=self._root)

    def rmdir(self, path: str) -> None:
        self._meet("change")
        os.rmdir(self._path(path), dir_fd=self._root)

    def unlink(self, path: str) -> None:
        self._meet("change")
        os.unlink(self._path(path), dir_fd=self._root)

    def rename(self, old: str, new: str) -> None:
        self._meet("change")
        os.rename(self._path(old), self._path(new), src_dir_fd=self._root, dst_dir_fd=self._root)

    def symlink(self, target: str, source: str) -> None:
        self._meet("change")
        os.symlink(source, self._path(target), dir_fd=self._root)

    def link(self, target: str, source: str) -> None:
        self._meet("change")
        os.link(
            self._path(source), self._path(target), src_dir_fd=self._root, dst_dir_fd=self._root
        )

    def chmod(self, path: str, mode: int) -> None:
        self._meet("change")
        os.chmod(self._path(path), mode, dir_fd=self._root)

    def chown(self, path: str, uid: int, gid: int) -> None:
        self._meet("change")
        os.chown(self._path(path), uid, gid, dir_fd=self._root, follow_symlinks=False)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        self._meet("change")
        os.utime(
            self._path(path),
            ns=times or (time.time_ns(),) * 2,
            dir_fd=self._root,
            follow_symlinks=False,
        )


def _serve(connection: socket.socket, ailments: Ailments, mounted: threading.Event) -> None:
    """Answers the launcher, until that goes away: then no process asks for this disk any more."""
    mounted.wait()
    try:
        _answer_all(connection, ailments)
    finally:
        os._exit(0)


def _answer_all(connection: socket.socket, ailments: Ailments) -> None:
    _answer(connection, Done())
    while data := connection.recv(BYTES_MAX):
        match _requests.decode(data):
            case ImposeTrouble(trouble):
                _answer(connection, Done(ailments.impose(trouble)))
            case LiftTrouble(number):
                _answer(connection, Done(number, ailments.lift(number)))
            case CountTrouble(number):
                _answer(connection, Done(number, ailments.met(number)))


def _answer(connection: socket.socket, answer: Done) -> None:
    connection.send(msgspec.json.encode(answer))


def main() -> None:
    """Entry point: the directory is the only argument, the launcher's socket is standard input."""
    set_name("ck-disk")
    restore_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = serve_launcher()
    directory = Path(sys.argv[1])
    root = os.open(
        directory, os.O_RDONLY | os.O_DIRECTORY
    )  # what lies below the mount, from now on
    ailments, mounted = Ailments(), threading.Event()
    threading.Thread(target=_serve, args=(connection, ailments, mounted), daemon=True).start()
    operations = _Directory(root, ailments, mounted)
    FUSE(operations, str(directory), foreground=True, fsname="chaoskit", nothreads=True)


if __name__ == "__main__":
    main()
