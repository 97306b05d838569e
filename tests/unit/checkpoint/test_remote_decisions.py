"""Decisions of the remote tier that need no answer of a store: the time of the next attempt, and
missing parts.
"""

from __future__ import annotations

import errno
import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, FileEntry, Manifest
from chaoskit.checkpoint.remote.backoff import Backoff, meaning
from chaoskit.checkpoint.remote.pace import UploadPace
from chaoskit.checkpoint.remote.parts import PARTS_MAX, content_md5, cut, md5, whole_etag
from chaoskit.checkpoint.remote.store import Traffic
from chaoskit.checkpoint.remote.upload import missing_files
from chaoskit.errors import BadInput

chances = st.floats(0, 1)


# -- back-off --------------------------------------------------------------------------------------


@given(chances, st.integers(0, 200), st.floats(0, 500))
def test_no_delay_is_longer_than_its_bound(chance: float, attempt: int, elapsed_s: float) -> None:
    backoff = Backoff(base_s=0.1, cap_s=10.0, deadline_s=120.0)
    delay_s = backoff.delay_s(attempt, elapsed_s, chance)
    if elapsed_s >= 120.0:
        assert delay_s is None
    else:
        assert delay_s is not None
        assert 0 <= delay_s <= min(10.0, 0.1 * 2**attempt)
        assert elapsed_s + delay_s <= 120.0 + 1e-9, "no attempt begins after the deadline"


@given(st.lists(chances, min_size=200, max_size=200), st.floats(0.01, 1), st.floats(1, 30))
def test_somebody_who_always_fails_gives_up_in_time(
    drawn: list[float], base_s: float, deadline_s: float
) -> None:
    backoff, elapsed_s = Backoff(base_s=base_s, cap_s=2.0, deadline_s=deadline_s), 0.0
    for attempt, chance in enumerate(drawn):
        delay_s = backoff.delay_s(attempt, elapsed_s, chance)
        if delay_s is None:
            return
        elapsed_s += delay_s + 0.2
    assert elapsed_s >= deadline_s - 2.2 or sum(drawn) < 100


@pytest.mark.parametrize("name", ["base_s", "cap_s", "deadline_s"])
def test_senseless_times_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        Backoff(**{name: -1.0})


@pytest.mark.parametrize(
    "setting", [{"request_timeout_s": 0}, {"limit_bytes_per_s": -1}, {"parallel": 0}]
)
def test_senseless_traffic_is_refused(setting: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(setting))):
        Traffic(**setting)  # type: ignore[arg-type]


class ClientError(Exception):
    """An error like botocore's, with a dict as answer."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


def translated(error: Exception, code: str, status: int) -> Exception:
    """Return the error as s3fs raises it."""
    error.__cause__ = ClientError(code, status)
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (translated(OSError(errno.EBUSY, "slow down"), "SlowDown", 503), "passing"),
        (translated(OSError(errno.EIO, "?"), "TooManyRequests", 429), "passing"),
        (translated(OSError(errno.EREMOTEIO, "?"), "InternalError", 500), "passing"),
        (translated(OSError(errno.EINVAL, "?"), "BadDigest", 400), "passing"),
        (translated(FileNotFoundError(), "NoSuchKey", 404), "missing"),
        (translated(OSError(errno.EINVAL, "?"), "InvalidRange", 416), "missing"),
        (translated(FileNotFoundError(), "NoSuchBucket", 404), "refused"),
        (translated(PermissionError(), "AccessDenied", 403), "refused"),
        (translated(PermissionError(), "ExpiredToken", 400), "refused"),
        (translated(OSError(errno.EINVAL, "?"), "MalformedXML", 400), "refused"),
        (FileNotFoundError(), "missing"),
        (PermissionError(), "refused"),
        (ConnectionResetError(), "passing"),
        (TimeoutError(), "passing"),
        (OSError(errno.ENOSPC, "full"), "passing"),
        (OSError(errno.EROFS, "read-only"), "refused"),
        (ValueError("a bug"), "refused"),
    ],
    ids=repr,
)
def test_what_errors_mean(error: Exception, said: str) -> None:
    meaning_found, remedy = meaning(error)
    assert meaning_found == said
    assert bool(remedy) == (said == "refused"), "a refusal comes with a remedy"


# -- pace ------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 2)), min_size=1, max_size=30),
    st.floats(1e3, 1e6),
)
def test_no_more_bytes_pass_than_are_allowed(
    pieces: list[tuple[int, float]], bytes_per_s: float
) -> None:
    pace, now_s, starts = UploadPace(bytes_per_s), 0.0, []
    for size_bytes, later_s in pieces:
        now_s += later_s
        starts.append((now_s + pace.wait_s(size_bytes, now_s), size_bytes))
    for (start_s, size_bytes), (next_s, _) in itertools.pairwise(starts):
        assert next_s >= start_s + size_bytes / bytes_per_s - 1e-6
    assert UploadPace().wait_s(10**12, 0.0) == 0.0


# -- parts -----------------------------------------------------------------------------------------


@given(st.integers(0, 5 * 2**40))
def test_parts_make_up_the_file(size_bytes: int) -> None:
    parts = cut(size_bytes)
    assert 1 <= len(parts) <= PARTS_MAX
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert sum(part.size_bytes for part in parts) == size_bytes
    assert all(part.offset % FILE_CHUNK_BYTES == 0 for part in parts)
    assert all(part.size_bytes >= 5 * 2**20 for part in parts[:-1]), "S3 takes no smaller ones"


def test_etags_are_those_of_s3() -> None:
    assert md5(b"a") == hashlib.md5(b"a").hexdigest()
    assert content_md5(md5(b"")) == "1B2M2Y8AsgTpgAmY7PhCfg=="
    assert (
        whole_etag([md5(b"a"), md5(b"b")])
        == hashlib.md5(hashlib.md5(b"a").digest() + hashlib.md5(b"b").digest()).hexdigest() + "-2"
    )


# -- what is missing -------------------------------------------------------------------------------

STATES = ("gone", "shorter", "other", "unknown", "right")


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(STATES)), max_size=8))
def test_what_is_there_is_not_sent_again(files: list[tuple[int, str]]) -> None:
    entries, sizes, digests, expected = [], {}, {}, set()
    for number, (size_bytes, state) in enumerate(files):
        entry = FileEntry(f"f{number}", size_bytes, ("ab" * 16,) if size_bytes else ())
        entries.append(entry)
        if state != "gone":
            sizes[entry.name] = size_bytes + (state == "shorter")
        if state in {"other", "right"}:
            digests[entry.name] = entry.digest if state == "right" else "?"
        if state in {"gone", "shorter", "other"}:
            expected.add(entry.name)
    missing = missing_files(Manifest(step=1, files=tuple(entries), items=()), sizes, digests)
    assert {entry.name for entry in missing} == expected
    assert [entry.size_bytes for entry in missing] == sorted(
        (entry.size_bytes for entry in missing), reverse=True
    )
