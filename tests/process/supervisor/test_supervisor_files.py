"""What passes through the stream to a supervisor as files: a job's source on its way there, journals and logs back."""

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
from chaoskit.wire.coordinator_files import RECORD


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


# -- journals and logs ------------------------------------------------------------------------------------------------


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def copied(here: Path, name: str) -> int:
    path = here / name
    return path.stat().st_size if path.exists() else 0


def test_what_is_written_there_comes_while_it_is_written(
    supervisor: Started, tmp_path: Path
) -> None:
    """Every byte once; what a program prints, and what it wrote before it was killed."""
    there, here = tmp_path / "there", tmp_path / "here"
    supervisor.link.ship(there, here, "node0")
    writer = supervisor.start("write", there / "journal" / "node0.jsonl")
    wait_until(
        lambda: supervisor.link.is_open() and copied(here, "journal/node0.jsonl") > 50_000,
        "some of the file",
    )
    complaint = supervisor.start("complain", "it is over")
    supervisor.exit_of(complaint)
    writer.signal(signal.SIGKILL)
    supervisor.exit_of(writer)
    (there / "disk").mkdir()
    (there / "disk" / "snapshot").write_text("of the node alone")
    whole = files_of(there)
    supervisor.link.settle(there)
    del whole["disk/snapshot"]
    assert files_of(here) == whole
    assert whole["log/node0.complain.log"] == b"it is over"
    lines = whole["journal/node0.jsonl"].splitlines()
    assert lines == [b"%d" % number for number in range(len(lines))]


def test_a_settled_run_leaves_nothing_on_the_node(supervisor: Started, tmp_path: Path) -> None:
    there = tmp_path / "there"
    supervisor.link.ship(there, tmp_path / "here", "node0")
    supervisor.exit_of(supervisor.start("complain", "it is over"))
    supervisor.link.settle(there)
    assert not there.exists()
    supervisor.link.settle(there)  # nothing is shipped any more


def test_much_that_is_written_takes_no_memory_there(supervisor: Started, tmp_path: Path) -> None:
    """It waits in its file until the runner reads; what is asked meanwhile is answered."""
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "log").mkdir(parents=True)
    (there / "log" / "node0.log").write_bytes(os.urandom(2**20) * 64)
    before_kb = resident_kb(supervisor.process.pid)
    supervisor.link.ship(there, here, "node0")
    wait_until(
        lambda: copied(here, "log/node0.log") or not supervisor.link.is_open(), "the first chunk"
    )
    assert resident_kb(supervisor.process.pid) - before_kb < 2**14
    supervisor.exit_of(supervisor.start("leave", 3))
    supervisor.link.settle(there)
    assert copied(here, "log/node0.log") == 2**26
    assert resident_kb(supervisor.process.pid) - before_kb < 2**14


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


@pytest.mark.slow
def test_a_runner_that_does_not_read_for_long_ends_nothing(far: Started, tmp_path: Path) -> None:
    """It may be stopped, or wait for another node. What is written meanwhile waits there, in its file."""
    there, here = tmp_path / "there", tmp_path / "here"
    far.link.ship(there, here, "node0")
    writer = far.start("write", there / "journal" / "node0.jsonl")
    with pytest.raises(subprocess.TimeoutExpired):
        far.process.wait(30.0)  # longer than it takes to find out that a machine is gone
    assert far.link.is_open()
    writer.signal(signal.SIGKILL)
    far.exit_of(writer)
    (there / "journal" / "node0.jsonl").rename(there / "journal" / "node0.kept")
    whole = (there / "journal" / "node0.kept").read_bytes()
    far.link.settle(there)
    assert whole.startswith((here / "journal" / "node0.jsonl").read_bytes()[:1000])
    assert len((here / "journal" / "node0.kept").read_bytes()) == len(whole)


def test_a_notice_waits_for_a_runner_that_reads_late(far: Started, tmp_path: Path) -> None:
    """All of it has left the machine before the supervisor ends: with a pod its network goes, and what is unsent."""
    there, here = tmp_path / "there", tmp_path / "here"
    far.link.ship(there, here, "node0")
    polite = far.start("wind_up", there / "log" / "node0.log")
    wait_until(lambda: far.link.is_open() and copied(here, "log/node0.log"), "its first lines")
    (there / "journal" / "node0.jsonl").write_bytes(bytes(200_000))
    far.process.send_signal(signal.SIGTERM)
    wait_until(lambda: linux.start_ticks(polite.pid) is None, "the end of the program")
    assert linux.state(far.process.pid) != "Z"
    far.link.tell(FilesTaken(0))  # what it is told meanwhile breaks nothing
    wait_until(lambda: not far.link.is_open(), "the end of the supervisor")
    assert far.link.has_left
    assert files_of(here) == files_of(there)


def test_a_supervisor_ends_only_when_the_runner_has_read_its_last_word(far: Started) -> None:
    """Though little is left to send: what its kernel still holds goes with the pod."""
    far.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        far.process.wait(1.5)
    wait_until(lambda: not far.link.is_open(), "the end of the supervisor")
    assert far.process.wait(30) == 0


def test_what_is_no_plain_file_is_not_shipped_and_ends_nothing(
    supervisor: Started, tmp_path: Path
) -> None:
    """Sockets, pipes, links out of the directory, and names that are no text: a job may leave any of them."""
    there, here = tmp_path / "there", tmp_path / "here"
    supervisor.link.ship(there, here, "node0")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(there / "log" / "node0.sock"))
    os.mkfifo(there / "log" / "node0.pipe")
    (there / "log" / "node0.loop").symlink_to("node0.loop")
    (there / "log" / "node0.out").symlink_to("/etc/hostname")
    (there / "log" / "node0.folder").mkdir()
    Path(os.fsdecode(os.fsencode(there / "log") + b"/node0.\xff")).write_text("x")
    (there / "log" / "node0.log").write_text("plain")
    supervisor.link.settle(there)
    assert files_of(here) == {"log/node0.log": b"plain"}


def test_more_files_than_descriptors_are_shipped(supervisor: Started, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    supervisor.link.ship(there, here, "node0")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(300):
        (there / "log" / f"node0.{number}.log").write_text(str(number))
    supervisor.link.settle(there)
    assert len(files_of(here)) == 300
    assert len(os.listdir("/proc/self/fd")) <= before


def test_what_could_not_be_written_here_is_told_also_when_the_supervisor_is_gone(
    far: Started, tmp_path: Path
) -> None:
    """No journal is short in silence."""
    there, here = tmp_path / "there", tmp_path / "here"
    (here / "journal" / "node0.jsonl").mkdir(parents=True)
    far.link.ship(there, here, "node0")
    (there / "journal" / "node0.jsonl").write_text("{}\n")
    far.process.terminate()
    wait_until(lambda: not far.link.is_open(), "the end of the supervisor")
    with pytest.raises(HarnessError, match="could not be copied"):
        far.link.settle(there)


def test_what_had_come_from_a_supervisor_that_is_gone_is_there(
    far: Started, tmp_path: Path
) -> None:
    """Though nothing had read it yet."""
    there, here = tmp_path / "there", tmp_path / "here"
    far.link.ship(there, here, "node0")
    (there / "journal" / "node0.jsonl").write_text("{}\n")
    far.process.terminate()
    assert far.process.wait(30) == 0
    far.link.settle(there)
    assert (here / "journal" / "node0.jsonl").read_text() == "{}\n"


def test_a_node_that_was_replaced_goes_on_in_the_same_files(tmp_path: Path) -> None:
    here = tmp_path / "here"
    for incarnation in (b"first ", b"second"):
        there = tmp_path / incarnation.decode().strip()
        started = on_tcp(there)
        (there / "journal").mkdir(parents=True)
        (there / "journal" / "node1.jsonl").write_bytes(incarnation)
        started.link.ship(there, here, "node1")
        started.link.settle(there)
        started.close()
    assert (here / "journal" / "node1.jsonl").read_bytes() == b"first second"


def test_what_cannot_be_written_here_is_an_error(supervisor: Started, tmp_path: Path) -> None:
    """And is called so: a run with a short journal must not be judged as if it were whole."""
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "journal").mkdir(parents=True)
    (there / "journal" / "node0.jsonl").write_text("{}\n")
    (here / "journal" / "node0.jsonl").mkdir(parents=True)
    supervisor.link.ship(there, here, "node0")
    with pytest.raises(HarnessError, match=r"could not be copied: .*directory"):
        supervisor.link.settle(there)


@pytest.mark.parametrize(
    ("name", "offset", "reason"),
    [
        ("journal/a.jsonl", 3, "goes on at byte 3, and 2 have come"),
        ("journal/a.jsonl", 0, "goes on at byte 0, and 2 have come"),
        ("../a.jsonl", 0, "no journal and no log"),
        ("journal/../../a", 0, "no journal and no log"),
        ("journal/..", 0, "no journal and no log"),
        ("disk/a.bin", 0, "no journal and no log"),
        ("journal/harness.jsonl", 0, "no journal and no log of a"),
        ("journal/ab.jsonl", 0, "no journal and no log of a"),
        ("journal/", 0, "no journal and no log"),
        ("log/a.link", 0, "symbolic links"),
    ],
)
def test_a_chunk_that_is_not_the_next_one_is_not_written(
    tmp_path: Path, name: str, offset: int, reason: str
) -> None:
    """Nor one that would lie elsewhere: a node is not trusted with the runner's files."""
    mirror = FileMirror(tmp_path / "run", "a")
    mirror.take(FileChunk("", "journal/a.jsonl", 0, b"ab"))
    (tmp_path / "run" / "log").mkdir()
    (tmp_path / "run" / "log" / "a.link").symlink_to(tmp_path / "elsewhere")
    before = files_of(tmp_path)
    mirror.take(FileChunk("", name, offset, b"c"))
    assert reason in mirror.failure
    mirror.take(
        FileChunk("", "journal/a.jsonl", 2, b"c")
    )  # the files that are there do not go on with a gap
    assert files_of(tmp_path) == before


def test_files_are_shipped_in_chunks_once(tmp_path: Path) -> None:
    """Whatever was there before, came in between, or in the end."""
    files = RunFiles(tmp_path)
    data = os.urandom(CHUNK_BYTES * 2 + 5)
    (tmp_path / "log" / "a").write_bytes(data)
    files.look()
    chunks = [next(iter(files.unshipped()))]
    chunks += files.unshipped()
    with (tmp_path / "log" / "a").open("ab") as file:
        file.write(b"more")
    chunks += files.unshipped()
    files.settle(1)
    chunks += files.unshipped()
    files.close()
    assert b"".join(chunk.data for chunk in chunks) == data + b"more"
    assert [chunk.offset for chunk in chunks] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES, len(data)]
    assert files.sizes() == {"log/a": len(data) + 4}


def test_a_record_is_shipped_anew_when_another_file_takes_its_place(tmp_path: Path) -> None:
    """As a coordinator does that takes it over. What else lies beside it stays there."""
    there, here = tmp_path / "there", tmp_path / "here"
    files, mirror = RunFiles(there, with_record=True), FileMirror(here, "coordinator")

    def ship() -> bytes:
        files.look()
        for chunk in files.unshipped():
            mirror.take(chunk)
        assert mirror.failure == ""
        return (here / RECORD).read_bytes()

    (there / RECORD).write_bytes(b"first\n")
    assert ship() == b"first\n"
    with (there / RECORD).open("ab") as file:
        file.write(b"more\n")
    assert ship() == b"first\nmore\n"
    (there / "coordinator.draft").write_bytes(b"a longer one than before\n")
    (there / "coordinator.draft").replace(there / RECORD)
    assert ship() == b"a longer one than before\n"
    with (there / RECORD).open(
        "r+b"
    ) as file:  # as a coordinator does where there was no room for a whole decision
        file.truncate(len(b"a longer one\n"))
    (there / RECORD).touch()
    files.look_at_all()
    assert ship() == b"a longer one "
    assert files_of(here).keys() == {RECORD}
    files.close()


def test_a_log_that_another_file_takes_the_place_of_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its copy only grows: one that began anew would be refused, and with it all that its node ships."""
    there, here = tmp_path / "there", tmp_path / "here"
    files, mirror = RunFiles(there), FileMirror(here, "node0")
    for data in (b"first", b"another file"):
        (there / "draft").write_bytes(data)
        (there / "draft").replace(there / "log" / "node0.log")
        files.look()
        for chunk in files.unshipped():
            mirror.take(chunk)
    assert mirror.failure == ""
    assert (here / "log" / "node0.log").read_bytes() == b"firster file"
    files.close()


def test_a_record_of_a_new_coordinator_takes_the_place_of_the_last_copy(tmp_path: Path) -> None:
    """Its pod ships it from the first byte; a node has none."""
    for data in (b"of the first pod", b"of the second"):
        FileMirror(tmp_path, "coordinator").take(FileChunk("", RECORD, 0, data))
    assert (tmp_path / RECORD).read_bytes() == b"of the second"
    node = FileMirror(tmp_path, "node0")
    node.take(FileChunk("", RECORD, 0, b"made up"))
    assert "no journal and no log of node0" in node.failure
    assert (tmp_path / RECORD).read_bytes() == b"of the second"


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
    """Also what was written after the notice, by a program that ends by itself, and by one that has to be killed."""
    there, here = tmp_path / "there", tmp_path / "here"
    far.link.ship(there, here, "node0")
    far.start("wind_up", there / "log" / "node0.log")
    far.start("defy", there / "journal" / "node0.0.jsonl")
    wait_until(
        lambda: far.link.is_open() and copied(here, "journal/node0.0.jsonl") > 2000,
        "its first lines",
    )
    far.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not far.link.is_open(), "the end of the supervisor")
    assert far.link.leaves
    assert far.link.has_left
    assert far.process.wait(30) == 0
    assert files_of(here) == files_of(there)
    assert (here / "log" / "node0.log").read_text().endswith("the end\n")


def test_a_supervisor_without_programs_ends_at_once(far: Started) -> None:
    far.process.send_signal(signal.SIGTERM)
    assert far.process.wait(30) == 0


# -- the source of a job ----------------------------------------------------------------------------------------------


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
    source, there = Source(job), tmp_path / "sources"
    supervisor.link.store(source, there)
    names = {IGNORE_FILE, "train.py", "lib/model.py"}
    assert files_of(there / source.digest) == {name: (job / name).read_bytes() for name in names}


def test_a_source_that_is_there_is_not_sent_again(
    supervisor: Started, job: Path, tmp_path: Path
) -> None:
    source, there = Source(job), tmp_path / "sources"
    supervisor.link.store(source, there)
    (there / source.digest / "mark").write_text("")
    supervisor.link.store(Source(job), there)
    assert (there / source.digest / "mark").exists()


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
    """A helper stays a program, a linked folder comes along, and a link to a folder above ends nothing."""
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
    ("ignored", "told"), [(b"!keep\n", "leave !keep out"), (b"\xff", "text file")]
)
def test_an_ignore_file_that_cannot_be_followed_is_refused(
    job: Path, ignored: bytes, told: str
) -> None:
    (job / IGNORE_FILE).write_bytes(ignored)
    with pytest.raises(BadInput, match=told):
        Source(job)


def test_patterns_may_begin_with_the_directory(job: Path) -> None:
    """Both ``/data`` and ``./data`` are the directory beside the job, as people write it."""
    digests = set()
    for pattern in ("data", "/data/", "./data"):
        (job / IGNORE_FILE).write_text(f"{IGNORE_FILE}\n{pattern}\n")
        digests.add(Source(job).digest)
    assert len(digests) == 1


def test_a_source_that_is_damaged_or_reaches_out_is_not_unpacked(tmp_path: Path) -> None:
    store = SourceStore()
    with pytest.raises(ValueError, match="came that is not"):
        store.take(tmp_path, "0" * 64, 0, b"other", is_last=True)
    with pytest.raises(ValueError, match="no SHA-256"):
        store.take(tmp_path, "../../etc", 0, b"", is_last=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    with pytest.raises(ValueError, match=r"'../outside' is no file below the directory"):
        store.take(tmp_path, digest, 0, packed.getvalue(), is_last=True)
    assert not store.holds(tmp_path, digest)
    assert not (tmp_path.parent / "outside").exists()


# -- logs that are printed, too ---------------------------------------------------------------------------------------


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


def test_lines_are_left_out_while_nothing_reads_the_output(pipe: tuple[int, int]) -> None:
    """Nothing waits for a reader, and lines that are longer than a pipe takes at once are cut."""
    echo = LogEcho(pipe[1])
    for _ in range(100):
        echo.take("log/node0.0.log", b"x" * 10_000 + b"\n")
    held = len(os.read(pipe[0], 2**20))
    assert held <= 2**16
    echo.take("log/node0.0.log", b"again\n")
    told = os.read(pipe[0], 2**16).decode()
    assert re.fullmatch(r"\[chaoskit\] \d+ lines were left out\n\[node0.0\] again\n", told)


@pytest.mark.parametrize("how", ["no reader", "no room", "reset", "closed"])
def test_lines_are_left_out_while_the_output_fails(pipe: tuple[int, int], how: str) -> None:
    """Nothing is raised, and the lines that were left out are counted when the output takes some again."""
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
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours.detach()
    read, write = os.pipe()
    os.close(read)
    if how == "closed":
        os.close(write)
    return write
