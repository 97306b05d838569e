"""Store of objects on any fsspec file system, with time limits, retries and clear errors.

-> ``remote/s3.py`` and ``remote/local.py``: stores that can do more than the common interface.
-> ``remote/opening.py``: chooses among them. ``remote/backoff.py``: which errors are retried.
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
from chaoskit.checkpoint.remote.pace import UploadPace
from chaoskit.checkpoint.remote.workers import Workers, finish
from chaoskit.errors import BadInput, ChaoskitError

Result = TypeVar("Result")

#: A generator of its own: the training's numbers must not depend on requests that fail.
_JITTER = random.Random()


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of the requests to a store.

    Args:
        backoff: delays between attempts of one request.
        request_timeout_s: time limit of one attempt; a part of 16 MiB must pass in it.
        limit_bytes_per_s: limit of all data that is sent, averaged over some parts; 0 for no limit.
        parallel: number of requests at a time. Each holds one part of 16 MiB in memory.

    Raises:
        BadInput: if a limit is out of range.
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
    """A function that returns a range of the bytes that are to be sent."""

    def __call__(self, offset: int, size_bytes: int, /) -> bytes: ...


class Store:
    """A store that reads, writes, lists and removes the objects below one URL.

    Names are relative to it, such as ``step-00000010.g0/manifest.json``.

    Args:
        fs: file system of fsspec.
        root: path of the URL in this file system.
        url: the URL, for messages.
        traffic: limits of requests.

    Attributes:
        sent_bytes: bytes of files that the store has accepted.

    Every method may raise, besides the errors that it names itself:

        RemoteRefused: at once, where asking again would not help.
        RemoteUnavailable: after the deadline of the back-off, or when the store is closed
            meanwhile.
    """

    def __init__(self, fs: Any, root: str, url: str, traffic: Traffic) -> None:
        self.url, self.traffic = url, traffic
        self._fs, self._root = fs, root.rstrip("/")
        self._pace, self._pace_lock = UploadPace(traffic.limit_bytes_per_s), threading.Lock()
        self._closing = threading.Event()
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._running_lock = threading.Lock()
        self._requests = Workers(traffic.parallel, "ck-request")
        self.sent_bytes = 0  # bytes of files that the store has accepted, for status reports

    # -- listing -----------------------------------------------------------------------------------

    def directories(self) -> list[str]:
        """Return the names of the directories directly below the URL."""
        return [name for name, info in self._entries("").items() if info["type"] == "directory"]

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size in bytes of each object in a directory; empty if there is none."""
        entries = self._entries(directory)
        return {name: int(info["size"]) for name, info in entries.items() if info["type"] == "file"}

    def _entries(self, directory: str) -> dict[str, dict[str, Any]]:
        """Return the file system's information on each entry of a directory, by name."""

        def request() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            infos: list[dict[str, Any]] = self._request("ls", self._path(directory), detail=True)
            return infos

        try:
            infos = self._retry(f"list {directory or 'snapshots'}", request)
        except FileNotFoundError:
            return {}
        return {info["name"].rstrip("/").rpartition("/")[2]: info for info in infos}

    def digest(self, name: str) -> str:
        """Return the XXH3-128 that the writer stored with an object, in hexadecimal.

        "" if there is none, as always here.
        """
        return ""

    # -- reading -----------------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        """Return a small object. Raise FileNotFoundError if it does not exist."""
        return self._retry(
            f"read {name}", lambda: bytes(self._request("cat_file", self._path(name)))
        )

    def get_range(self, name: str, offset: int, size_bytes: int) -> bytes:
        """Return a part of an object, shorter at its end.

        Raise FileNotFoundError if it does not exist. If it ends before ``offset``, some stores
        raise that, too, and others return b"".
        """
        end = offset + size_bytes
        return self._retry(
            f"read {name}",
            lambda: bytes(self._request("cat_file", self._path(name), start=offset, end=end)),
        )

    # -- writing -----------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, whole or not at all."""
        self._retry(f"write {name}", lambda: self._request("pipe_file", self._path(name), data))

    def send(self, name: str, entry: FileEntry, read: Read) -> bool:
        """Write a file from its start: this interface cannot resume an unfinished write.

        Args:
            name: name of the object.
            entry: size and digest of the file.
            read: returns a range of its bytes. A ChaoskitError of it is passed on at once.

        Returns:
            True if the store has confirmed that it received these bytes, which only some stores do;
            otherwise they must be read back.
        """

        counted_bytes = 0

        def write() -> None:
            nonlocal counted_bytes
            self.sent_bytes -= counted_bytes  # the bytes of a failed attempt are sent again
            counted_bytes = 0
            with self._fs.open(self._path(name), "wb", block_size=FILE_CHUNK_BYTES) as file:
                for offset in range(0, entry.size_bytes, FILE_CHUNK_BYTES):
                    part = read(offset, min(FILE_CHUNK_BYTES, entry.size_bytes - offset))
                    self._throttle(len(part))
                    file.write(part)
                    self.sent_bytes += len(part)
                    counted_bytes += len(part)
                self._make_durable(file)

        self._retry(f"write {name}", write)
        return False

    def _make_durable(self, file: Any) -> None:
        """Write an open file to the disk before it is closed. Does nothing in most stores."""

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        try:
            self._retry(f"remove {name}", lambda: self._request("rm_file", self._path(name)))
        except FileNotFoundError:
            pass

    def forget(self, directory: str) -> None:
        """Remove what is left of a directory whose objects were removed. Does nothing here."""

    # -- common to all -----------------------------------------------------------------------------

    def submit(
        self, act: Callable[..., Result], *arguments: Any
    ) -> concurrent.futures.Future[Result]:
        """Run ``act`` when one of the parallel requests is free. Return the future of its result.

        The future is cancelled if the store is closed before.
        """
        return self._requests.submit(act, *arguments)

    def each(self, act: Callable[..., Result], *arguments: list[Any]) -> Iterator[Result]:
        """Yield the results of ``map(act, *arguments)``, with several requests at a time.

        No request is begun before the first result is asked for. The first error is raised after
        all requests under way have ended, and those not begun are left out: no memory is written
        after it.
        """
        futures = [self.submit(act, *row) for row in zip(*arguments, strict=True)]
        try:
            for future in futures:
                yield _result(future, self.url)
        finally:
            finish(futures)

    def close(self) -> None:
        """Cancel the requests under way, which raise RemoteUnavailable in their threads.

        Later requests raise it, too. Returns at once.
        """
        self._closing.set()
        with self._running_lock:
            for future in self._running:
                future.cancel()
        self._requests.close()

    def _path(self, name: str) -> str:
        """Return the path of an object in the file system."""
        return f"{self._root}/{name}" if name else self._root

    def _throttle(self, size_bytes: int) -> None:
        """Wait until the bandwidth limit allows to send so many bytes.

        Raise RemoteUnavailable if the store is closed meanwhile.
        """
        with self._pace_lock:
            wait_s = self._pace.wait_s(size_bytes, time.monotonic())
        if self._closing.wait(wait_s):
            raise RemoteUnavailable(f"{self.url} was closed")

    def _retry(self, action: str, act: Callable[[], Result]) -> Result:
        """Call ``act`` until it succeeds, is refused, or the deadline has passed.

        Return its result.

        Args:
            action: description of the request for an error message, after "cannot".

        Raises:
            FileNotFoundError: if the object does not exist.
            RemoteRefused, RemoteUnavailable: see :class:`Store`.
        """
        begin_s, backoff = time.monotonic(), self.traffic.backoff
        for attempt in range(2**31):
            if self._closing.is_set():
                break
            try:
                return act()
            except concurrent.futures.CancelledError:
                break
            except ChaoskitError:  # an error of the source, not of the store
                raise
            except Exception as error:
                kind, remedy = meaning(error)
                if kind == "missing":
                    raise FileNotFoundError(
                        f"{self.url}: cannot {action}: there is no such object"
                    ) from error
                if kind == "refused":
                    raise RemoteRefused(
                        f"{self.url}: cannot {action}: {_describe(error)}: {remedy}"
                    ) from error
                delay_s = backoff.delay_s(attempt, time.monotonic() - begin_s, _JITTER.random())
                if delay_s is None:
                    tried = f"{attempt + 1} times in {time.monotonic() - begin_s:.1f} s"
                    raise RemoteUnavailable(
                        f"{self.url}: cannot {action}, tried {tried}: {_describe(error)}"
                    ) from error
                self._closing.wait(delay_s)
        raise RemoteUnavailable(f"{self.url} was closed")

    def _request(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system, and return its result.

        A request to an asynchronous file system raises TimeoutError at the time limit, and is
        cancelled when the store is closed. Others have no time limit.
        """
        if not self._fs.async_impl:
            return getattr(self._fs, method)(*arguments, **options)
        return self._await(getattr(self._fs, f"_{method}")(*arguments, **options))

    def _await(self, request: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of a request on the file system's event loop.

        Raise TimeoutError at the time limit of a request.
        """
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
    """Return the result of a request, or raise RemoteUnavailable if the store was closed."""
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise RemoteUnavailable(f"{url} was closed") from None


def _describe(error: BaseException) -> str:
    """Return the type and the message of an error as text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
