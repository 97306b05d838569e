"""Widths of helps and tables: each fits a terminal of 60 and 80 columns, and no identifier in it is
broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from rich.cells import cell_len
from rich.console import RenderableType
from support.runs import run as record
from unit.report.test_report import failed, outcome, passed

from chaoskit.cli.app import COMMANDS, app, run
from chaoskit.cli.machine import cluster, doctor, node
from chaoskit.cli.machine.probes import PROBES
from chaoskit.cli.testing import canary
from chaoskit.cli.training import rules
from chaoskit.health import Finding, HealthVerdict
from chaoskit.health.verdict import NodeStanding
from chaoskit.history.record import new_id
from chaoskit.history.store import RunHistory, encode
from chaoskit.report.store import write_outcome
from chaoskit.report.summary import render_summary
from chaoskit.report.tables import Column, DataTable
from chaoskit.report.terminal import Terminal
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Verdict
from faults.kinds import kinds

WIDTHS = (60, 80)
NAME = "test_first.py::test_a_lost_rank_comes_back[tiny]"
COMMAND = "torchrun --standalone --nproc-per-node=2 --max-restarts=1 train.py --learning-rate 0.001 --out {run_dir}/x"


def assert_fits(text: str, width: int, identifiers: list[str]) -> None:
    """Assert that no line is wider than the terminal, and that each identifier is whole."""
    lines = text.splitlines()
    assert lines
    assert [line for line in lines if cell_len(line.rstrip()) > width] == []
    assert [name for name in identifiers if not any(name in line for line in lines)] == []


# -- help ------------------------------------------------------------------------------------------


def _commands() -> Iterator[list[str]]:
    """Yield the words of every command and subcommand."""
    root: Any = typer.main.get_command(app)
    yield []
    for name in COMMANDS:
        yield [name]
        yield from (
            [name, below] for below in getattr(root.get_command(None, name), "commands", {})
        )


@pytest.mark.parametrize("width", [*WIDTHS, 120])
@pytest.mark.parametrize("words", list(_commands()), ids=" ".join)
def test_help_is_wrapped_once(
    words: list[str],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each line is as full as possible: the first word of the next line would not have fitted."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert run([*words, "--help"]) == 0
    text = capsys.readouterr().out
    root: Any = typer.main.get_command(app)
    command, context = root, typer.Context(root)
    for word in words:
        command = command.get_command(context, word)
    names = [
        name for parameter in command.params for name in parameter.opts if name.startswith("-")
    ]
    assert_fits(
        text, width, [*names, *getattr(command, "commands", ()), " ".join(["chaoskit", *words])]
    )
    prose = text.partition("╭")[0]
    for paragraph in re.split(r"\n\s*\n", prose.strip("\n")):
        lines = [line.strip() for line in paragraph.splitlines()]
        for line, following in pairwise(lines):
            assert len(f"{line} {following.split()[0]}") > width - 2, f"{line!r} ends early"
    assert "[/]" not in text, "markup is shown as text"


# -- completion ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("chaoskit la", {"launch"}),
        ("chaoskit history sh", {"show"}),
        ("chaoskit launch --no", {"--nodes", "--no-resume", "--notice-signal"}),
        ("chaoskit faults KillN", {"KillNode"}),
        ("chaoskit test smo", {"smoke"}),
        ("chaoskit launch gp", {"gpt"}),
        ("chaoskit launch my_", {"my_train.py"}),
        ("chaoskit nosuch x", set()),
    ],
)
def test_a_shell_completes_names(
    typed: str,
    words: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The shell asks by environment variables, and gets a word a line, and no error."""
    (tmp_path / "my_train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_CHAOSKIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        run([])
    answer = capsys.readouterr()
    assert ended.value.code == 0
    assert set(answer.out.split()) == words
    assert answer.err == ""


def test_the_help_names_the_options_that_install_completion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--help"]) == 0
    assert "--install-completion" in capsys.readouterr().out


# -- tables of commands ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a history, reports, and files that commands read."""
    root = tmp_path_factory.mktemp("terminal")
    runs = [
        record(0.05, series="6a665f8d30f908ca", title=NAME, commit="64445ce0f1", seed=123456),
        record(9.05, series="6a665f8d30f908ca", title=NAME, verdict=Verdict.FAILED, lost_steps=3),
        record(
            None,
            series="f7f76ae075b09217",
            title="test_first.py::test_fails",
            verdict=Verdict.UNKNOWN,
        ),
    ]
    history = RunHistory(str(root / "history"))
    history.add(new_id(), runs)
    history.close()
    (root / "before.jsonl").write_bytes(
        encode([record(0.01, series=run.series, title=run.title) for run in runs])
    )
    (root / "after.jsonl").write_bytes(encode(runs))
    (root / "ids").write_text("\n".join(run.run_id for run in runs))
    for number, stored in enumerate(outcomes()):
        (root / "report" / str(number)).mkdir(parents=True)
        write_outcome(stored, root / "report" / str(number))
    (root / "sla.yaml").write_text(
        "version: 1\nslas:\n- name: a lost rank comes back\n  where: {fault: Kill}\n"
        '  always: ["lost_steps == 0"]\n  objectives: ["recovery.p95 <= 2 s"]\n'
    )
    (root / "rules.yaml").write_text(
        "- name: JobHangingDetectionOfTheSecondKind\n  logPattern: '.*step ([0-9]+)'\n"
        "  expectedRecurringFrequencyInSeconds: 10\n"
    )
    (root / "log.txt").write_text(
        "2026-01-01 00:00:00 step 1\n2026-01-01 00:00:01 step 2\n2026-01-01 00:01:01 step 3\n"
    )
    return root


def outcomes() -> list[Outcome]:
    by_command = outcome("test_command", verdict=Verdict.FAILED, session="20261128-182837-11715")
    return [
        passed(),
        failed(),
        msgspec.structs.replace(by_command, job=COMMAND, reasons=["it ended with status 1"]),
    ]


_SERIES = ["6a665f8d30f908ca", "f7f76ae075b09217"]
_CASES: dict[str, list[str]] = {
    "history list history": [*_SERIES, NAME, "test_first.py::test_fails"],
    "history show history test_fails": ["f7f76ae075b09217", "ID2"],
    "history show history 6a66": ["6a665f8d30f908ca", "ID0", "ID1", NAME],
    "report report": ["20261128-182837-11715", "torchrun … train.py"],
    "compare before.jsonl after.jsonl": [f"{NAME}:"],
    "sla check sla.yaml history": ["a lost rank comes back: lost_steps == 0", "ID1"],
    "rules test rules.yaml log.txt": ["JobHangingDetectionOfTheSecondKind"],
    "faults": [kind.__name__ for kind in kinds()],
    **{f"faults {kind.__name__}": [kind.__name__] for kind in kinds()},
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("typed", list(_CASES))
def test_a_table_fits_the_terminal(
    typed: str,
    width: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(width))
    run(typed.split())
    shown = capsys.readouterr()
    ids = (folder / "ids").read_text().split()
    names = [ids[int(name[2:])] if name.startswith("ID") else name for name in _CASES[typed]]
    assert shown.err == ""
    assert_fits(shown.out, width, names)


def _findings() -> RenderableType:
    findings = [
        Finding("disk.free_bytes", severity="ok", value=81439371264, limit=256000000),
        Finding(
            "gpu.count",
            value=0,
            limit=8,
            severity="bad",
            detail="no GPU here: nvidia-ml-py is not installed",
        ),
    ]
    return node.render(
        findings,
        HealthVerdict("node-with-a-long-name-3", NodeStanding.REFUSED, ("gpu.count: 0, below 8",)),
    )


def _tried() -> RenderableType:
    return canary.render(
        [
            canary.CanaryResult(
                "a replica that skips a reduction and goes on",
                "replicated, 3 ranks",
                "losses",
                "failed",
                "mistake",
            )
        ]
    )


def _doctor() -> RenderableType:
    return doctor.render(doctor.examine(PROBES[:8]))


def _sessions() -> RenderableType:
    return cluster.render_sessions(
        [
            {
                "session": "chaoskit-1f2e3d4c",
                "pods": 12,
                "since": "2026-11-28T18:28:37Z",
                "started_by": "somebody@a-machine.example.com",
            }
        ]
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("made", "names"),
    [
        (_findings, ["disk.free_bytes", "81439371264", "node-with-a-long-name-3"]),
        (_tried, ["mistakes: 1"]),
        (_doctor, ["PR_SET_PDEATHSIG"]),
        (
            _sessions,
            ["chaoskit-1f2e3d4c", "2026-11-28T18:28:37Z", "somebody@a-machine.example.com"],
        ),
        (lambda: render_summary(outcomes()), ["20261128-182837-11715"]),
        (lambda: rules.render([]), ["least / median / greatest"]),
    ],
)
def test_what_other_commands_print_fits_the_terminal(
    made: Any, names: list[str], width: int
) -> None:
    assert_fits(rendered(made(), width), width, names)


def rendered(renderable: RenderableType, width: int) -> str:
    console = Terminal(width=width)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


# -- the table itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(40, 140, 7))
def test_identifiers_and_numbers_are_whole_at_any_width(width: int) -> None:
    """A table is shown if it fits; otherwise each row is a block."""
    run_id = new_id()
    table = DataTable(
        Column("run", is_heading=True),
        Column("size", is_number=True),
        Column("machine", is_text=True),
        Column("name"),
    )
    table.add_row(
        run_id, "123456789 MB", "a processor, 2 cores, local, and more words", "step-000000010.g0"
    )
    text = rendered(table, width)
    assert_fits(text, width, [run_id, "123456789 MB", "step-000000010.g0"])
    for word in ("processor,", "cores,", "local,", "words"):
        assert word in text
    is_table = text.startswith("run ")
    assert is_table == (width >= 36 + 2 + 12 + 2 + 24 + 2 + 17)


def test_a_long_command_is_shortened_in_a_row_and_whole_nowhere_else() -> None:
    text = rendered(render_summary(outcomes()), 200)
    assert COMMAND not in text
    assert re.search(
        r"torchrun … train\.py --learning-rate 0\.001 --out \{run_dir\}/x on 4 nodes", text
    )
