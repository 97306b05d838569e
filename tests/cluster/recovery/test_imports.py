"""A job that cannot be imported ends at once, with the exception, its file and line, before any
worker is started.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import LIMIT_S

from chaoskit.errors import BadInput
from chaoskit.job import JobSpec, import_job
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.runtime.worker.failure import failure_of
from chaoskit.runtime.worker.zygote import (
    Broken,
    Loaded,
    NotStarted,
    Report,
    order_worker,
    report_decoder,
)
from chaoskit.vocabulary import Event

JOB = """
import torch

def train(trainer, steps=3):
    model = torch.nn.Linear(1, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards([1.0] * 8, batch_size=4):
                step.backward(model(shard.batch[:, None].float()).mean())
"""
ZYGOTE = """
import os, socket, sys
from chaoskit.job import JobSpec
from chaoskit.runtime.worker.zygote import run_zygote
run_zygote(socket.socket(fileno=int(sys.argv[1])), os.getppid(), JobSpec(sys.argv[2]), fork=True)
"""


def write_job(directory: Path, first_lines: str, name: str = "job.py") -> str:
    """Write the job with ``first_lines`` before it, and return its path."""
    path = directory / name
    path.write_text(first_lines + JOB)
    return str(path)


class ForkServer:
    """A fork server that the test has started as its agent."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.connection, self.process = connection, process

    def order(self, worker: str) -> None:
        """Order a worker, with descriptors of the right kind."""
        files = [os.memfd_create("test") for _ in range(3)]
        try:
            order_worker(self.connection, worker, b"{}", files)
        finally:
            for file in files:
                os.close(file)

    def report(self) -> Report:
        """Return the next report; fail the test if the fork server has hung up."""
        data = self.connection.recv(2**17)
        assert data, f"the fork server has ended with {self.process.wait()}"
        report: Report = report_decoder.decode(data)
        return report


@contextmanager
def fork_server(job: str) -> Iterator[ForkServer]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.settimeout(LIMIT_S)
    command = [sys.executable, "-c", ZYGOTE, str(far.fileno()), job]
    with subprocess.Popen(command, pass_fds=[far.fileno()], stderr=subprocess.PIPE) as process:
        far.close()
        try:
            yield ForkServer(near, process)
        finally:
            near.close()
            process.kill()


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("exit(3)\n", "SystemExit: 3"),
    ],
    ids=["missing module", "exit"],
)
def test_a_fork_server_whose_job_is_broken_answers_each_order_until_its_agent_hangs_up(
    tmp_path: Path, lines: str, error: str
) -> None:
    job = write_job(tmp_path, lines)
    with fork_server(job) as server:
        server.order("node0.0")  # before the import has failed
        assert server.report() == Broken(f"{error} ({job}:1)")
        for number in range(3):
            assert server.report() == NotStarted(
                f"node0.{number}", f"the job cannot be imported: {error} ({job}:1)"
            )
            server.order(f"node0.{number + 1}")
        server.connection.close()
        assert server.process.wait(LIMIT_S) == 0


def test_a_fork_server_says_that_its_job_is_imported(tmp_path: Path) -> None:
    with fork_server(write_job(tmp_path, "")) as server:
        assert server.report() == Loaded()


HELPERS = {
    "no_syntax.py": "def broken(:\n",
    "nested.py": "\n\ndef load():\n    raise LookupError('no dataset')\n",
    "silent.py": "class Silent(Exception):\n    def __str__(self):\n        raise ValueError\n\nraise Silent\n",
}


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("import no_syntax\n", "SyntaxError: invalid syntax ({}/no_syntax.py:1)"),
        ("import nested\nnested.load()\n", "LookupError: no dataset ({}/nested.py:4)"),
        ("import silent\n", "Silent: its message cannot be read: ValueError ({}/silent.py:5)"),
        (
            "\nraise RuntimeError('first\\nsecond \\udcff')\n",
            "RuntimeError: first second \\udcff ({}/job.py:2)",
        ),
        (
            "import json\njson.loads('{')\n",
            "JSONDecodeError: Expecting property name * ({}/job.py:2)",
        ),
        (
            "from . import nested\n",
            "ImportError: attempted relative import with no known parent package ({}/job.py:1)",
        ),
        ("assert False\n", "AssertionError ({}/job.py:1)"),
    ],
    ids=["syntax", "helper", "message", "lines", "library", "relative", "empty"],
)
def test_an_exception_is_one_line_with_the_file_and_the_line_of_the_job(
    tmp_path: Path, lines: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the innermost line of the user's own code, not one of a library."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in HELPERS.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    job = write_job(tmp_path, lines)
    with pytest.raises(BaseException) as raised:
        import_job(JobSpec(job))
    before, _, after = error.format(tmp_path).partition("*")
    message = failure_of(raised.value, job).error
    assert message.startswith(before.rstrip())
    assert message.endswith(after or before)
    assert "job" not in sys.modules, "what was half imported is not left behind"


def test_an_exception_that_quotes_a_traceback_ends_with_what_is_quoted() -> None:
    """The message of an exception that quotes a traceback, as a DataLoader's worker raises it, ends
    with its last line.
    """
    traceback = "Original Traceback (most recent call last):\n  File\nKeyError: 'x'\n"
    text = f"Caught KeyError in DataLoader worker process 0.\n{traceback}"
    assert failure_of(RuntimeError(text)).error == (
        "RuntimeError: Caught KeyError in DataLoader worker process 0: KeyError: 'x'"
    )


def test_a_long_message_is_cut() -> None:
    """A report of the fork server must fit into one message."""
    assert len(failure_of(RuntimeError("x" * 10**6)).error) < 3000


def test_input_that_the_job_refuses_keeps_field_value_and_remedy() -> None:
    failure = failure_of(BadInput("DATA", "/nowhere", "set it to a folder"))
    assert failure.refused == ("DATA", "'/nowhere'", "set it to a folder")


# -- whole runs ------------------------------------------------------------------------------------


def run(chaos: Chaos, job: str, **plan: object) -> Outcome:
    settings = {"nodes": 2, "spares": 1, "steps": 3, "twin": False, "check": False}
    outcome: Outcome = chaos.run(job, **settings | plan)
    return outcome


def of(outcome: Outcome, event: Event) -> list[object]:
    return list(outcome.records(str(event)))


@pytest.mark.promise(
    "A job that cannot be imported ends at once, with the exception, its file and its line."
)
@pytest.mark.parametrize("fork", [True, False])
def test_a_run_ends_with_the_exception_of_the_import(
    chaos: Chaos, tmp_path: Path, fork: bool
) -> None:
    job = write_job(tmp_path, "\nimport no_such_module\n")
    outcome = run(chaos, job, fork=fork)
    problem = f"training completed: ModuleNotFoundError: No module named 'no_such_module' ({job}:2)"
    assert outcome.reasons == [problem]
    assert outcome.false_alarms == 0
    assert not of(outcome, Event.DETECTED), "no worker is tried again"


@pytest.mark.parametrize(
    ("lines", "status"),
    [("import os\nos._exit(7)\n", "status 7"), ("import ctypes\nctypes.string_at(0)\n", "SIGSEGV")],
    ids=["exit", "crash"],
)
def test_an_import_that_ends_its_process_ends_the_run(
    chaos: Chaos, tmp_path: Path, lines: str, status: str
) -> None:
    job = write_job(tmp_path, lines)
    outcome = run(chaos, job)
    (reason,) = outcome.reasons
    assert reason.startswith(
        f"training completed: importing {job} ended the process, with {status}; see node"
    )


def test_input_that_is_refused_in_an_import_is_refused(chaos: Chaos, tmp_path: Path) -> None:
    lines = (
        "from chaoskit import BadInput\nraise BadInput('DATA', '/nowhere', 'set it to a folder')\n"
    )
    with pytest.raises(BadInput, match="DATA='/nowhere': set it to a folder"):
        run(chaos, write_job(tmp_path, lines))


def test_an_exception_in_a_step_is_said_once_and_is_no_false_alarm(
    chaos: Chaos, tmp_path: Path
) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        JOB.replace("step.backward", "raise KeyError('column')\n                step.backward")
    )
    outcome = run(chaos, str(path))
    assert outcome.reasons == [f"training completed: KeyError: 'column' ({path}:10)"]
    assert outcome.false_alarms == 0
