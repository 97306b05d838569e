"""Any fsspec file system as a store of objects: requests with time limit and back-off, errors with a meaning.

What a kind of store can do better than the common interface is in modules beside this one (``s3.py``, ``local.py``).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import msgspec

from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, FileEntry
from chaoskit.checkpoint.remote.backoff import Backoff, RemoteRefused, RemoteUnavailable, meaning
from chaoskit.checkpoint.remote.pace import Pace
from chaoskit.checkpoint.remote.workers import Workers, finish
from chaoskit.errors import BadInput, ChaoskitError

Result = TypeVar("Result")


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a store is talked to.

    Args:
        backoff: between attempts of one request.
        request_timeout_s: of one attempt; a part of 16 MiB must pass in it.
        limit_bytes_per_s: of all that is sent, on average over some parts; 0: no limit.
        parallel: requests at a time. Each holds one part of 16 MiB in memory.
    """

    backoff: Backoff = Backoff()
    request_timeout_s: float = 60.0
    limit_bytes_per_s: float = 0.0
    parallel: int = 4

    def __post_init__(self) -> None:
        if not self.request_timeout_s > 0:
            raise BadInput("request_timeout_s", self.request_timeout_s, "use seconds, more than 0")
        if not self.limit_bytes_per_s >= 0:
            raise BadInput(
                "limit_bytes_per_s",
                self.limit_bytes_per_s,
                "use bytes per second, or 0 for no limit",
            )
        if self.parallel < 1:
            raise BadInput("parallel", self.parallel, "use 1 or more requests at a time")


class Read(Protocol):
    """Gives so many bytes of what is to be sent, from an offset on."""

    def __call__(self, offset: int, size_bytes: int, /) -> bytes: ...


class Store:
    """What lies below one URL. Names are relative to it, such as ``step-00000010.g0/manifest.json``.

    Every method may raise, beside what it names itself:

        RemoteRefused: at once, where asking again would not help.
        RemoteUnavailable: after the deadline of the back-off, or when the store is closed meanwhile.
    """

    def __init__(self, fs: Any, root: str, url: str, traffic: Traffic) -> None:
        self.url, self.traffic = url, traffic
        self._fs, self._root = fs, root.rstrip("/")
        self._pace, self._pace_lock = Pace(traffic.limit_bytes_per_s), threading.Lock()
        self._closing = threading.Event()
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._running_lock = threading.Lock()
        self._requests = Workers(traffic.parallel, "ck-request")
        self.sent_bytes = 0  # of files, as far as the store has taken them; for people

    # -- what there is ------------------------------------------------------------------------------------------

    def directories(self) -> list[str]:
        """Names of the directories directly below the URL."""
        return [name for name, info in self._entries("").items() if info["type"] == "directory"]

    def sizes(self, directory: str) -> dict[str, int]:
        """The objects in a directory: size in bytes by name. Empty if there is none."""
        entries = self._entries(directory)
        return {name: int(info["size"]) for name, info in entries.items() if info["type"] == "file"}

    def _entries(self, directory: str) -> dict[str, dict[str, Any]]:
        def ask() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            found: list[dict[str, Any]] = self._ask("ls", self._path(directory), detail=True)
            return found

        try:
            infos = self._attempts(f"list {directory or 'snapshots'}", ask)
        except FileNotFoundError:
            return {}
        return {info["name"].rstrip("/").rpartition("/")[2]: info for info in infos}

    def digest(self, name: str) -> str:
        """XXH3-128 that the writer of an object gave it, if the store keeps that beside what it verified; else ""."""
        return ""

    # -- reading ------------------------------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        """A small object. Raises FileNotFoundError if it is not there."""
        return self._attempts(
            f"read {name}", lambda: bytes(self._ask("cat_file", self._path(name)))
        )

    def get_range(self, name: str, offset: int, size_bytes: int) -> bytes:
        """A part of an object; shorter where the object ends. Raises FileNotFoundError if it is not there."""
        end = offset + size_bytes
        return self._attempts(
            f"read {name}",
            lambda: bytes(self._ask("cat_file", self._path(name), start=offset, end=end)),
        )

    # -- writing ------------------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, whole or not at all."""
        self._attempts(f"write {name}", lambda: self._ask("pipe_file", self._path(name), data))

    def send(self, name: str, entry: FileEntry, read: Read) -> bool:
        """Write a file, from its start: this interface has no way to go on with one that was begun.

        Returns:
            Whether the store has confirmed that it took these bytes; else they are to be read back.
        """

        counted_bytes = 0

        def write() -> None:
            nonlocal counted_bytes
            self.sent_bytes -= counted_bytes  # what a failed attempt has sent is sent again
            counted_bytes = 0
            with self._fs.open(self._path(name), "wb", block_size=FILE_CHUNK_BYTES) as file:
                for offset in range(0, entry.size_bytes, FILE_CHUNK_BYTES):
                    part = read(offset, min(FILE_CHUNK_BYTES, entry.size_bytes - offset))
                    self._throttle(len(part))
                    file.write(part)
                    self.sent_bytes += len(part)
                    counted_bytes += len(part)
                self._settle(file)

        self._attempts(f"write {name}", write)
        return False

    def _settle(self, file: Any) -> None:
        """The last thing before a file is closed."""

    def remove(self, name: str) -> None:
        """Remove an object; it is no error if there is none."""
        try:
            self._attempts(f"remove {name}", lambda: self._ask("rm_file", self._path(name)))
        except FileNotFoundError:
            pass

    def forget(self, directory: str) -> None:
        """Remove what is left of a directory whose objects were removed."""

    # -- common to all --------------------------------------------------------------------------------------------

    def submit(
        self, act: Callable[..., Result], *arguments: Any
    ) -> concurrent.futures.Future[Result]:
        """Do it when one of the requests that are allowed at a time is free."""
        return self._requests.submit(act, *arguments)

    def each(self, act: Callable[..., Result], *arguments: list[Any]) -> Iterator[Result]:
        """``map(act, *arguments)`` with as many requests at a time as are allowed.

        The first error ends it, when those that are under way have ended: nothing is touched any more after it.
        """
        futures = [self.submit(act, *row) for row in zip(*arguments, strict=True)]
        try:
            for future in futures:
                yield _result(future, self.url)
        finally:
            finish(futures)

    def close(self) -> None:
        """End what is under way: it raises RemoteUnavailable in its threads."""
        self._closing.set()
        with self._running_lock:
            for future in self._running:
                future.cancel()
        self._requests.close()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _throttle(self, size_bytes: int) -> None:
        with self._pace_lock:
            wait_s = self._pace.wait_s(size_bytes, time.monotonic())
        if self._closing.wait(wait_s):
            raise RemoteUnavailable(f"{self.url} was closed")

    def _attempts(self, what: str, act: Callable[[], Result]) -> Result:
        """Do it until it succeeds, is refused, or the deadline has passed. Raises FileNotFoundError, too."""
        begin_s, backoff = time.monotonic(), self.traffic.backoff
        for attempt in range(2**31):
            if self._closing.is_set():
                break
            try:
                return act()
            except concurrent.futures.CancelledError:
                break
            except ChaoskitError:  # of the source, not of the store
                raise
            except Exception as error:
                said, remedy = meaning(error)
                if said == "missing":
                    raise FileNotFoundError(f"{self.url}: {what}: there is none") from error
                if said == "refused":
                    raise RemoteRefused(
                        f"{self.url}: cannot {what}: {_text(error)}: {remedy}"
                    ) from error
                delay_s = backoff.delay_s(attempt, time.monotonic() - begin_s, random.random())
                if delay_s is None:
                    tried = f"{attempt + 1} times in {time.monotonic() - begin_s:.1f} s"
                    raise RemoteUnavailable(
                        f"{self.url}: cannot {what}, tried {tried}: {_text(error)}"
                    ) from error
                self._closing.wait(delay_s)
        raise RemoteUnavailable(f"{self.url} was closed")

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """One request. That of an asynchronous file system ends at the time limit, or when the store is closed."""
        if not self._fs.async_impl:
            return getattr(self._fs, method)(*arguments, **options)
        return self._await(getattr(self._fs, f"_{method}")(*arguments, **options))

    def _await(self, request: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(request, self._fs.loop)
        with self._running_lock:
            self._running.add(future)
        try:
            return future.result(self.traffic.request_timeout_s)
        except TimeoutError:
            future.cancel()
            raise
        finally:
            with self._running_lock:
                self._running.discard(future)


def _result(future: concurrent.futures.Future[Result], url: str) -> Result:
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise RemoteUnavailable(f"{url} was closed") from None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
