"""Tests of files that pass through the stream to a supervisor: a job's source there, journals and
logs back.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nodes.supervisors import Started, on_tcp, on_unix
from support.waiting import wait_until

from chaoskit.errors import BadInput, HarnessError
from chaoskit.process import linux
from chaoskit.process.linux import DirectoryWatch
from chaoskit.substrate.supervisor import sources
from chaoskit.substrate.supervisor.files import CHUNK_BYTES, FileMirror, RunFiles
from chaoskit.substrate.supervisor.log_echo import LogEcho
from chaoskit.substrate.supervisor.messages import FileChunk, FilesTaken
from chaoskit.substrate.supervisor.sources import IGNORE_FILE, Source, SourceStore
from chaoskit.wire.coordinator_files import COORDINATOR_LOG


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Started]:
    started = on_tcp(tmp_path / "there")
    yield started
    started.close()


@pytest.fixture(params=[on_unix, on_tcp])
def supervisor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Started]:
    started: Started = request.param(tmp_path / "there")
    yield started
    started.close()


# -- journals and logs -----------------------------------------------------------------------------


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def copied(local: Path, name: str) -> int:
    path = local / name
    return path.stat().st_size if path.exists() else 0


def test_what_is_written_there_comes_while_it_is_written(
    supervisor: Started, tmp_path: Path
) -> None:
    """Every byte comes once, including a program's output and the data written before a kill."""
    remote, local = tmp_path / "there", tmp_path / "here"
    supervisor.link.ship(remote, local, "node0")
    writer = supervisor.start("write", remote / "journal" / "node0.jsonl")
    wait_until(
        lambda: supervisor.link.is_open() and copied(local, "journal/node0.jsonl") > 50_000,
        "some of the file",
    )
    complaint = supervisor.start("complain", "it is over")
    supervisor.exit_of(complaint)
    writer.signal(signal.SIGKILL)
    supervisor.exit_of(writer)
    (remote / "disk").mkdir()
    (remote / "disk" / "snapshot").write_text("of the node alone")
    whole = files_of(remote)
    supervisor.link.settle(remote)
    del whole["disk/snapshot"]
    assert files_of(local) == whole
    assert whole["log/node0.complain.log"] == b"it is over"
    lines = whole["journal/node0.jsonl"].splitlines()
    assert lines == [b"%d" % number for number in range(len(lines))]


def test_a_settled_run_leaves_nothing_on_the_node(supervisor: Started, tmp_path: Path) -> None:
    remote = tmp_path / "there"
    supervisor.link.ship(remote, tmp_path / "here", "node0")
    supervisor.exit_of(supervisor.start("complain", "it is over"))
    supervisor.link.settle(remote)
    assert not remote.exists()
    supervisor.link.settle(remote)  # shipping has ended


def test_the_rest_of_logs_may_be_limited_and_journals_are_whole(
    supervisor: Started, tmp_path: Path
) -> None:
    remote, local = tmp_path / "there", tmp_path / "here"
    supervisor.link.ship(remote, local, "node0")
    (remote / "log" / "node0.log").write_bytes(b"x" * 2**26)
    wait_until(
        lambda: copied(local, "log/node0.log") or not supervisor.link.is_open(), "the first chunk"
    )
    (remote / "journal" / "node0.jsonl").write_bytes(b"x" * 2**20)
    supervisor.link.settle(remote, 100_000)
    assert 100_000 < copied(local, "log/node0.log") < 2**25
    assert copied(local, "journal/node0.jsonl") == 2**20
    assert not remote.exists()


def test_much_that_is_written_takes_no_memory_there(supervisor: Started, tmp_path: Path) -> None:
    """The data waits in its file until the runner reads; requests meanwhile are answered."""
    remote, local = tmp_path / "there", tmp_path / "here"
    (remote / "log").mkdir(parents=True)
    (remote / "log" / "node0.log").write_bytes(os.urandom(2**20) * 64)
    before_kb = resident_kb(supervisor.process.pid)
    supervisor.link.ship(remote, local, "node0")
    wait_until(
        lambda: copied(local, "log/node0.log") or not supervisor.link.is_open(), "the first chunk"
    )
    assert resident_kb(supervisor.process.pid) - before_kb < 2**14
    supervisor.exit_of(supervisor.start("leave", 3))
    supervisor.link.settle(remote)
    assert copied(local, "log/node0.log") == 2**26
    assert resident_kb(supervisor.process.pid) - before_kb < 2**14


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


@pytest.mark.slow
def test_a_runner_that_does_not_read_for_long_ends_nothing(far: Started, tmp_path: Path) -> None:
    """The runner may be stopped, or wait for another node. New data waits in its file meanwhile."""
    remote, local = tmp_path / "there", tmp_path / "here"
    far.link.ship(remote, local, "node0")
    writer = far.start("write", remote / "journal" / "node0.jsonl")
    with pytest.raises(subprocess.TimeoutExpired):
        far.process.wait(30.0)  # longer than it takes to detect a lost machine
    assert far.link.is_open()
    writer.signal(signal.SIGKILL)
    far.exit_of(writer)
    (remote / "journal" / "node0.jsonl").rename(remote / "journal" / "node0.kept")
    whole = (remote / "journal" / "node0.kept").read_bytes()
    far.link.settle(remote)
    assert whole.startswith((local / "journal" / "node0.jsonl").read_bytes()[:1000])
    assert len((local / "journal" / "node0.kept").read_bytes()) == len(whole)


def test_a_notice_waits_for_a_runner_that_reads_late(far: Started, tmp_path: Path) -> None:
    """All data has left the machine before the supervisor ends: unsent data would be lost with the
    pod's network.
    """
    remote, local = tmp_path / "there", tmp_path / "here"
    far.link.ship(remote, local, "node0")
    polite = far.start("wind_up", remote / "log" / "node0.log")
    wait_until(lambda: far.link.is_open() and copied(local, "log/node0.log"), "its first lines")
    (remote / "journal" / "node0.jsonl").write_bytes(bytes(200_000))
    far.process.send_signal(signal.SIGTERM)
    wait_until(lambda: linux.start_ticks(polite.pid) is None, "the end of the program")
    assert linux.state(far.process.pid) != "Z"
    far.link.notify(FilesTaken(0))  # a message that comes meanwhile has no effect
    wait_until(lambda: not far.link.is_open(), "the end of the supervisor")
    assert far.link.has_left
    assert files_of(local) == files_of(remote)


def test_a_supervisor_ends_only_when_the_runner_has_read_its_last_word(far: Started) -> None:
    """The supervisor waits even for little data: bytes in its kernel's buffer would be lost with
    the pod.
    """
    far.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        far.process.wait(1.5)
    wait_until(lambda: not far.link.is_open(), "the end of the supervisor")
    assert far.process.wait(30) == 0


def test_what_is_no_plain_file_is_not_shipped_and_ends_nothing(
    supervisor: Started, tmp_path: Path
) -> None:
    """A job may leave sockets, pipes, links out of the directory, and names that are not valid
    text.
    """
    remote, local = tmp_path / "there", tmp_path / "here"
    supervisor.link.ship(remote, local, "node0")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(remote / "log" / "node0.sock"))
    os.mkfifo(remote / "log" / "node0.pipe")
    (remote / "log" / "node0.loop").symlink_to("node0.loop")
    (remote / "log" / "node0.out").symlink_to("/etc/hostname")
    (remote / "log" / "node0.folder").mkdir()
    Path(os.fsdecode(os.fsencode(remote / "log") + b"/node0.\xff")).write_text("x")
    (remote / "log" / "node0.log").write_text("plain")
    supervisor.link.settle(remote)
    assert files_of(local) == {"log/node0.log": b"plain"}


def test_more_files_than_descriptors_are_shipped(supervisor: Started, tmp_path: Path) -> None:
    remote, local = tmp_path / "there", tmp_path / "here"
    supervisor.link.ship(remote, local, "node0")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(300):
        (remote / "log" / f"node0.{number}.log").write_text(str(number))
    supervisor.link.settle(remote)
    assert len(files_of(local)) == 300
    assert len(os.listdir("/proc/self/fd")) <= before


def test_what_could_not_be_written_here_is_told_also_when_the_supervisor_is_gone(
    far: Started, tmp_path: Path
) -> None:
    """A journal that could not be copied completely is always reported."""
    remote, local = tmp_path / "there", tmp_path / "here"
    (local / "journal" / "node0.jsonl").mkdir(parents=True)
    far.link.ship(remote, local, "node0")
    (remote / "journal" / "node0.jsonl").write_text("{}\n")
    far.process.terminate()
    wait_until(lambda: not far.link.is_open(), "the end of the supervisor")
    with pytest.raises(HarnessError, match="could not be copied"):
        far.link.settle(remote)


def test_what_had_come_from_a_supervisor_that_is_gone_is_there(
    far: Started, tmp_path: Path
) -> None:
    """The data is there even if it had not been read yet."""
    remote, local = tmp_path / "there", tmp_path / "here"
    far.link.ship(remote, local, "node0")
    (remote / "journal" / "node0.jsonl").write_text("{}\n")
    far.process.terminate()
    assert far.process.wait(30) == 0
    far.link.settle(remote)
    assert (local / "journal" / "node0.jsonl").read_text() == "{}\n"


def test_a_node_that_was_replaced_goes_on_in_the_same_files(tmp_path: Path) -> None:
    local = tmp_path / "here"
    for incarnation in (b"first ", b"second"):
        remote = tmp_path / incarnation.decode().strip()
        started = on_tcp(remote)
        (remote / "journal").mkdir(parents=True)
        (remote / "journal" / "node1.jsonl").write_bytes(incarnation)
        started.link.ship(remote, local, "node1")
        started.link.settle(remote)
        started.close()
    assert (local / "journal" / "node1.jsonl").read_bytes() == b"first second"


def test_what_cannot_be_written_here_is_an_error(supervisor: Started, tmp_path: Path) -> None:
    """The error is explicit, since a run with an incomplete journal must not be judged as if it
    were complete.
    """
    remote, local = tmp_path / "there", tmp_path / "here"
    (remote / "journal").mkdir(parents=True)
    (remote / "journal" / "node0.jsonl").write_text("{}\n")
    (local / "journal" / "node0.jsonl").mkdir(parents=True)
    supervisor.link.ship(remote, local, "node0")
    with pytest.raises(HarnessError, match=r"could not be copied: .*directory"):
        supervisor.link.settle(remote)


@pytest.mark.parametrize(
    ("name", "offset", "reason"),
    [
        ("journal/a.jsonl", 3, "next chunk begins at byte 3, but 2 bytes were received"),
        ("journal/a.jsonl", 0, "next chunk begins at byte 0, but 2 bytes were received"),
        ("../a.jsonl", 0, "not a journal or log"),
        ("journal/../../a", 0, "not a journal or log"),
        ("journal/..", 0, "not a journal or log"),
        ("disk/a.bin", 0, "not a journal or log"),
        ("journal/harness.jsonl", 0, "not a journal or log of a"),
        ("journal/ab.jsonl", 0, "not a journal or log of a"),
        ("journal/", 0, "not a journal or log"),
        ("log/a.link", 0, "symbolic links"),
    ],
)
def test_a_chunk_that_is_not_the_next_one_is_not_written(
    tmp_path: Path, name: str, offset: int, reason: str
) -> None:
    """A chunk outside of the directory is refused, too: a node is not trusted with the runner's
    files.
    """
    mirror = FileMirror(tmp_path / "run", "a")
    mirror.take(FileChunk("", "journal/a.jsonl", 0, b"ab"))
    (tmp_path / "run" / "log").mkdir()
    (tmp_path / "run" / "log" / "a.link").symlink_to(tmp_path / "elsewhere")
    before = files_of(tmp_path)
    mirror.take(FileChunk("", name, offset, b"c"))
    assert reason in mirror.failure
    mirror.take(
        FileChunk("", "journal/a.jsonl", 2, b"c")
    )  # existing files are not continued with a gap
    assert files_of(tmp_path) == before


def test_files_are_shipped_in_chunks_once(tmp_path: Path) -> None:
    """Every byte is shipped once, whether it was there before, came in between, or came at the
    end.
    """
    files = RunFiles(tmp_path)
    data = os.urandom(CHUNK_BYTES * 2 + 5)
    (tmp_path / "log" / "a").write_bytes(data)
    files.look()
    chunks = [next(iter(files.unsent_chunks()))]
    chunks += files.unsent_chunks()
    with (tmp_path / "log" / "a").open("ab") as file:
        file.write(b"more")
    chunks += files.unsent_chunks()
    files.settle(1)
    chunks += files.unsent_chunks()
    files.close()
    assert b"".join(chunk.data for chunk in chunks) == data + b"more"
    assert [chunk.offset for chunk in chunks] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES, len(data)]
    assert files.sizes() == {"log/a": len(data) + 4}


def test_a_record_is_shipped_anew_when_another_file_takes_its_place(tmp_path: Path) -> None:
    """A coordinator that takes over replaces the file. Other files beside it are not shipped."""
    remote, local = tmp_path / "there", tmp_path / "here"
    files, mirror = RunFiles(remote, with_log=True), FileMirror(local, "coordinator")

    def ship() -> bytes:
        files.look()
        for chunk in files.unsent_chunks():
            mirror.take(chunk)
        assert mirror.failure == ""
        return (local / COORDINATOR_LOG).read_bytes()

    (remote / COORDINATOR_LOG).write_bytes(b"first\n")
    assert ship() == b"first\n"
    with (remote / COORDINATOR_LOG).open("ab") as file:
        file.write(b"more\n")
    assert ship() == b"first\nmore\n"
    (remote / "coordinator.draft").write_bytes(b"a longer one than before\n")
    (remote / "coordinator.draft").replace(remote / COORDINATOR_LOG)
    assert ship() == b"a longer one than before\n"
    with (remote / COORDINATOR_LOG).open(
        "r+b"
    ) as file:  # a coordinator truncates the file if there was no room for a whole decision
        file.truncate(len(b"a longer one\n"))
    (remote / COORDINATOR_LOG).touch()
    files.look_at_all()
    assert ship() == b"a longer one "
    assert files_of(local).keys() == {COORDINATOR_LOG}
    files.close()


def test_a_log_that_another_file_takes_the_place_of_goes_on_where_it_was(tmp_path: Path) -> None:
    """The copy only grows: a log that began again would be refused, with all other files of its
    node.
    """
    remote, local = tmp_path / "there", tmp_path / "here"
    files, mirror = RunFiles(remote), FileMirror(local, "node0")
    for data in (b"first", b"another file"):
        (remote / "draft").write_bytes(data)
        (remote / "draft").replace(remote / "log" / "node0.log")
        files.look()
        for chunk in files.unsent_chunks():
            mirror.take(chunk)
    assert mirror.failure == ""
    assert (local / "log" / "node0.log").read_bytes() == b"firster file"
    files.close()


def test_a_record_of_a_new_coordinator_takes_the_place_of_the_last_copy(tmp_path: Path) -> None:
    """The new coordinator's pod ships the log from the first byte; a node has none."""
    for data in (b"of the first pod", b"of the second"):
        FileMirror(tmp_path, "coordinator").take(FileChunk("", COORDINATOR_LOG, 0, data))
    assert (tmp_path / COORDINATOR_LOG).read_bytes() == b"of the second"
    node = FileMirror(tmp_path, "node0")
    node.take(FileChunk("", COORDINATOR_LOG, 0, b"made up"))
    assert "not a journal or log of node0" in node.failure
    assert (tmp_path / COORDINATOR_LOG).read_bytes() == b"of the second"


def test_a_watch_names_what_has_changed(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("")
    watch = DirectoryWatch([tmp_path])
    assert watch.changed() == set()
    (tmp_path / "old").write_text("more")
    (tmp_path / "new name, and long").write_text("")
    assert watch.changed() == {tmp_path / "old", tmp_path / "new name, and long"}
    assert watch.changed() == set()
    watch.close()


@pytest.mark.parametrize("attempt", range(5))
def test_a_supervisor_that_is_told_to_end_ships_everything_first(
    attempt: int, far: Started, tmp_path: Path
) -> None:
    """Data that programs write after the notice is shipped, too, whether they end by themselves or
    are killed.
    """
    remote, local = tmp_path / "there", tmp_path / "here"
    far.link.ship(remote, local, "node0")
    far.start("wind_up", remote / "log" / "node0.log")
    far.start("defy", remote / "journal" / "node0.0.jsonl")
    wait_until(
        lambda: far.link.is_open() and copied(local, "journal/node0.0.jsonl") > 2000,
        "its first lines",
    )
    far.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not far.link.is_open(), "the end of the supervisor")
    assert far.link.leaves
    assert far.link.has_left
    assert far.process.wait(30) == 0
    assert files_of(local) == files_of(remote)
    assert (local / "log" / "node0.log").read_text().endswith("the end\n")


def test_a_supervisor_without_programs_ends_at_once(far: Started) -> None:
    far.process.send_signal(signal.SIGTERM)
    assert far.process.wait(30) == 0


# -- the source of a job ---------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    directory = tmp_path / "job"
    for name in (
        "train.py",
        "lib/model.py",
        "lib/__pycache__/model.pyc",
        ".git/HEAD",
        "data/large.bin",
        "notes.txt",
    ):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    (directory / IGNORE_FILE).write_text("# what nodes need not have\ndata/\n*.txt\n")
    return directory


def test_a_source_is_unpacked_on_the_node(supervisor: Started, job: Path, tmp_path: Path) -> None:
    source, remote = Source(job), tmp_path / "sources"
    supervisor.link.store(source, remote)
    names = {IGNORE_FILE, "train.py", "lib/model.py"}
    assert files_of(remote / source.digest) == {name: (job / name).read_bytes() for name in names}


def test_a_source_that_is_there_is_not_sent_again(
    supervisor: Started, job: Path, tmp_path: Path
) -> None:
    source, remote = Source(job), tmp_path / "sources"
    supervisor.link.store(source, remote)
    (remote / source.digest / "mark").write_text("")
    supervisor.link.store(Source(job), remote)
    assert (remote / source.digest / "mark").exists()


def test_the_same_files_are_the_same_source(job: Path) -> None:
    digest = Source(job).digest
    (job / "data" / "large.bin").write_text("ignored")
    os.utime(job / "train.py", (0, 0))
    assert Source(job).digest == digest
    (job / "train.py").write_text("edited")
    assert Source(job).digest != digest


def test_a_source_that_is_too_large_is_refused_by_its_largest_files(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SIZE_BYTES_MAX", 3 * 2**20)
    for number in range(1, 7):
        (job / f"large{number}.bin").write_bytes(bytes(number * 2**20))
    with pytest.raises(
        BadInput, match=r"large6.bin \(6 MiB\), large5.bin .* large2.bin \(2 MiB\)$"
    ) as refused:
        Source(job)
    assert IGNORE_FILE in str(refused.value)


def test_a_source_keeps_what_runs_and_what_links_lead_to(job: Path, tmp_path: Path) -> None:
    """A helper stays executable, a linked folder is included, and a link to a folder above does no
    harm.
    """
    (job / "helper.sh").write_text("#!/bin/sh\n")
    (job / "helper.sh").chmod(0o750)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "common.py").write_text("x = 1\n")
    (job / "linked").symlink_to("../shared")
    (job / "lib" / "up").symlink_to("..")
    source, store = Source(job), SourceStore()
    store.take(tmp_path, source.digest, 0, source.data, is_last=True)
    unpacked = tmp_path / source.digest
    assert (unpacked / "linked" / "common.py").read_text() == "x = 1\n"
    assert os.access(unpacked / "helper.sh", os.X_OK)
    assert not (unpacked / "lib" / "up").exists()


def test_a_sender_that_was_broken_off_begins_anew(job: Path, tmp_path: Path) -> None:
    source, store = Source(job), SourceStore()
    store.take(tmp_path, source.digest, 0, source.data[:100], is_last=False)
    store.take(tmp_path, source.digest, 0, source.data[:300], is_last=False)
    store.take(tmp_path, source.digest, 300, source.data[300:], is_last=True)
    assert store.holds(tmp_path, source.digest)


@pytest.mark.parametrize(
    ("ignored", "told"), [(b"!keep\n", "remove !keep"), (b"\xff", "text file")]
)
def test_an_ignore_file_that_cannot_be_followed_is_refused(
    job: Path, ignored: bytes, told: str
) -> None:
    (job / IGNORE_FILE).write_bytes(ignored)
    with pytest.raises(BadInput, match=told):
        Source(job)


def test_patterns_may_begin_with_the_directory(job: Path) -> None:
    """Both ``/data`` and ``./data`` are the directory beside the job."""
    digests = set()
    for pattern in ("data", "/data/", "./data"):
        (job / IGNORE_FILE).write_text(f"{IGNORE_FILE}\n{pattern}\n")
        digests.add(Source(job).digest)
    assert len(digests) == 1


def test_a_source_that_is_damaged_or_reaches_out_is_not_unpacked(tmp_path: Path) -> None:
    store = SourceStore()
    with pytest.raises(ValueError, match="does not have the digest"):
        store.take(tmp_path, "0" * 64, 0, b"other", is_last=True)
    with pytest.raises(ValueError, match="not a SHA-256"):
        store.take(tmp_path, "../../etc", 0, b"", is_last=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    with pytest.raises(ValueError, match=r"'../outside' is not a file below the directory"):
        store.take(tmp_path, digest, 0, packed.getvalue(), is_last=True)
    assert not store.holds(tmp_path, digest)
    assert not (tmp_path.parent / "outside").exists()


# -- logs that are printed, too --------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


def test_lines_of_logs_are_printed_behind_the_name_of_their_process(pipe: tuple[int, int]) -> None:
    echo = LogEcho(pipe[1])
    echo.take("log/node0.0.log", b"one\ntw")
    echo.take("log/node0.1.log", b"other\n")
    echo.take("log/node0.0.log", b"o\nthr\xff")
    assert os.read(pipe[0], 2**16) == b"[node0.0] one\n[node0.1] other\n[node0.0] two\n"
    echo.finish()
    assert os.read(pipe[0], 2**16) == b"[node0.0] thr\xff\n"


def test_short_lines_are_printed_in_few_writes() -> None:
    """A supervisor that writes each line alone answers nothing for a tenth of a second a chunk."""
    read, write = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)  # a read returns what one write has written
    try:
        LogEcho(write).take("log/node0.log", b"y\n" * 1000)
        blocks = [os.read(read, 2**16) for _ in range(3)]
    finally:
        os.close(read)
        os.close(write)
    assert b"".join(blocks) == b"[node0] y\n" * 1000


def test_lines_are_left_out_while_nothing_reads_the_output(pipe: tuple[int, int]) -> None:
    """No writer waits for a reader, and lines longer than the pipe takes at once are cut."""
    echo = LogEcho(pipe[1])
    for _ in range(100):
        echo.take("log/node0.0.log", b"x" * 10_000 + b"\n")
    held = len(os.read(pipe[0], 2**20))
    assert held <= 2**16
    echo.take("log/node0.0.log", b"again\n")
    printed = os.read(pipe[0], 2**16).decode()
    assert re.fullmatch(r"\[chaoskit\] \d+ lines were left out\n\[node0.0\] again\n", printed)


@pytest.mark.parametrize("how", ["no reader", "no room", "reset", "closed"])
def test_lines_are_left_out_while_the_output_fails(pipe: tuple[int, int], how: str) -> None:
    """No error is raised, and the left-out lines are counted when the output works again."""
    output = failing_output(how)
    echo = LogEcho(output)
    echo.take("log/node0.0.log", b"one\ntwo\n")
    os.dup2(pipe[1], output)
    echo.take("log/node0.0.log", b"again\n")
    os.close(output)
    assert os.read(pipe[0], 2**16) == b"[chaoskit] 2 lines were left out\n[node0.0] again\n"


def failing_output(how: str) -> int:
    """Return a descriptor to which nothing can be written."""
    if how == "no room":
        return os.open("/dev/full", os.O_WRONLY)
    if how == "reset":
        writer, reader = socket.socketpair()
        reader.close()
        return writer.detach()
    read, write = os.pipe()
    os.close(read)
    if how == "closed":
        os.close(write)
    return write
