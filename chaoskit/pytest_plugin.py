"""The pytest face of chaoskit: fixture ``chaos``, marker, options, and exit codes that tell a verdict.

    def test_losing_a_rank_costs_nothing(chaos):
        outcome = chaos.run("gpt", nodes=4, steps=60, faults=[Kill(rank=2, at_step=20)])
        assert outcome.recovery.seconds < 0.5

Imports of torch and of the harness wait until a test asks for ``chaos``: installing chaoskit slows no other suite.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chaoskit.config import DETECTION
from chaoskit.errors import BadInput, CommandFailed, HarnessError, error_line, long_notes
from chaoskit.plaintext import printable
from chaoskit.substrate.registry import names, unavailable
from chaoskit.typed import convert
from chaoskit.vocabulary import Verdict

if TYPE_CHECKING:
    from chaoskit.experiment.harness import Harness
    from chaoskit.experiment.remote.host import ExperimentHost
    from chaoskit.faults.base import Fault
    from chaoskit.history.compare import RunComparison
    from chaoskit.history.session import SessionRecords
    from chaoskit.rules import Fired
    from chaoskit.runlog.outcome import Outcome
    from chaoskit.sla.judge import Judged

_VERDICT_PROPERTY = "chaoskit.verdict"
_BAD_INPUT = "bad input"
_SESSION_INPUT = "chaoskit_session"


class VerdictError(AssertionError):
    """The outcome of a run is not ``passed``. Carries the outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        reasons = printable("; ".join(outcome.reasons))  # pytest writes it to the terminal as it is
        super().__init__(f"{outcome.verdict.value}: {reasons} (journals: {outcome.directory})")


# -- options ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaoskit", "fault injection for distributed training")
    group.addoption(
        "--chaos-substrate",
        default=None,
        help="where nodes come from (default: what a test asks for, else local)",
    )
    group.addoption(
        "--chaos-docker-image",
        metavar="IMAGE",
        default=None,
        help="image with chaoskit in it, for the substrate docker (default: $CHAOSKIT_DOCKER_IMAGE, else this Python)",
    )
    group.addoption("--chaos-seed", type=int, default=None, help="seed of every run (default: 0)")
    group.addoption(
        "--chaos-repeats",
        type=int,
        default=None,
        help="run each chaos test this many times (default: 1)",
    )
    group.addoption(
        "--chaos-history",
        metavar="STORE",
        default=None,
        help="keep a record of every run in STORE: a folder, or a URL such as s3://bucket/history",
    )
    group.addoption(
        "--chaos-save",
        metavar="FILE",
        default=None,
        help="write the records of this session to FILE",
    )
    group.addoption(
        "--chaos-compare",
        metavar="FILE",
        default=None,
        help="compare with the records in FILE, or in a history: what got worse fails the session. A FILE that is not "
        "there yet is made of this session",
    )
    group.addoption(
        "--chaos-tolerance",
        metavar="SHARE",
        type=float,
        default=None,
        help="how much longer something may take before it counts as worse (default: 0.25)",
    )
    group.addoption(
        "--chaos-strict",
        action="store_true",
        default=False,
        help="exit with 10 where a comparison could not decide, or had nothing to compare with",
    )
    group.addoption(
        "--chaos-summary",
        metavar="FILE",
        default=None,
        help="add the comparison to FILE, as Markdown for a CI job",
    )
    group.addoption(
        "--chaos-report",
        metavar="DIR",
        default=None,
        help="write outcomes, journals and an HTML page to DIR",
    )
    group.addoption(
        "--chaos-traceback",
        action="store_true",
        default=False,
        help="show where chaoskit itself failed, with everything that it quotes, instead of one line",
    )
    parser.addini(
        "chaos_detection",
        "limits within which a rank or a node is taken for lost, unless a test names them: 'production', or 'relaxed' "
        "for machines that are shared with other work",
        default="production",
    )
    parser.addini(
        "chaos_substrate",
        "where nodes come from, unless a test asks for another place",
        default="local",
    )
    parser.addini(
        "chaos_docker_image", "image with chaoskit in it, for the substrate docker", default=""
    )
    parser.addini("chaos_seed", "seed of every run", default="0")
    parser.addini("chaos_repeats", "how often each chaos test is run", default="1")
    parser.addini("chaos_history", "where a record of every run is kept", default="")
    parser.addini("chaos_report", "directory for outcomes, journals and the HTML page", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "chaos(**defaults): defaults for chaos.run in this test, such as nodes=2 or seed=7; repeats=N runs it N times; "
        "substrate='netns' (or 'docker') runs it there, unless --chaos-substrate says otherwise; "
        "definition=N begins a new series of records where the test measures something else from now on; "
        "detection='production' (or 'relaxed') overrides the ini value chaos_detection",
    )
    config.addinivalue_line(
        "markers",
        "sla(*lines, **options): what this test promises of its runs in --chaos-history, or in this session, such as "
        "'lost_steps == 0' or 'recovery.p95 <= 2 s'; options as in a file of SLAs: window, confidence, at_least",
    )
    _require_values(config)
    settings = _settings(config)
    config.stash[_settings_key] = settings
    config.pluginmanager.register(_Tally(settings, _records(config)), "chaoskit-tally")


_TEXT_OPTIONS = ("substrate", "docker_image", "save", "compare", "summary", "report")


def _require_values(config: pytest.Config) -> None:
    """Refuse empty options, such as ``--chaos-report "$DIR"`` with an unset variable: they would mean nothing.

    An empty ``--chaos-history`` turns off the store that an ini file names.
    """
    for name in _TEXT_OPTIONS:
        if config.getoption(f"chaos_{name}") == "":
            raise pytest.UsageError(
                f"--chaos-{name.replace('_', '-')}='': give it a value, or leave it out"
            )


def _absolute(place: str | None, base: Path) -> str:
    """A place as it is named from anywhere: a test may change the working directory."""
    return place if place and "://" in place else str(base / place) if place else ""


@dataclass(frozen=True)
class _Settings:
    """What options and ini values say.

    ``forced``: what was given on the command line, which goes before what the marker of a test says. ``session``: the
    name of this session, by which runs of several sessions in one report directory are told apart.
    """

    forced: frozenset[str]
    substrate: str
    seed: int
    repeats: int
    report: Path | None
    docker_image: str
    detection: str
    session: str


_settings_key = pytest.StashKey[_Settings]()
_sources_key = pytest.StashKey[Any]()
_chaos_key = pytest.StashKey["Chaos"]()


def _records(config: pytest.Config) -> SessionRecords | None:
    """The records of this session; None where none are asked for. Under xdist the controller keeps them."""
    given: dict[str, Any] = {
        name: config.getoption(f"chaos_{name}")
        for name in ("save", "compare", "tolerance", "summary")
    }
    store = config.getoption("chaos_history") or config.getini("chaos_history")
    if not given["compare"] and (given["summary"] or given["tolerance"] is not None):
        raise pytest.UsageError("--chaos-summary and --chaos-tolerance: give --chaos-compare, too")
    if config.getoption("collectonly") or not (store or given["save"] or given["compare"]):
        return None
    if given["tolerance"] is not None and not 0 < given["tolerance"] < 10:
        raise pytest.UsageError(
            f"--chaos-tolerance={given['tolerance']}: use a share above 0, such as 0.1"
        )
    from chaoskit.history.place import sources_at

    config.stash[_sources_key] = sources_at(config.rootpath)
    if hasattr(config, "workerinput"):
        return None
    from chaoskit.history.compare import TOLERANCE
    from chaoskit.history.session import SessionRecords
    from chaoskit.process.host_checks import require_writable

    places = {name: _absolute(given[name], Path.cwd()) for name in ("save", "compare", "summary")}
    store = _absolute(store, Path.cwd() if config.getoption("chaos_history") else config.rootpath)
    if places["save"] and places["save"] == places["compare"]:
        raise pytest.UsageError(
            "--chaos-save and --chaos-compare: use two files: else what got worse is compared next"
        )
    try:
        for name, place in places.items():
            if place and "://" not in place and not (name == "compare" and Path(place).exists()):
                require_writable(f"chaos_{name}", Path(place).parent)
                if Path(place).is_dir():
                    raise BadInput(f"chaos_{name}", place, "name a file")
        save = Path(places["save"]) if places["save"] else None
        return SessionRecords(store, save, places["compare"], given["tolerance"] or TOLERANCE)
    except BadInput as error:
        raise pytest.UsageError(str(error)) from None


def _settings(config: pytest.Config) -> _Settings:
    def value(name: str) -> Any:
        given = config.getoption(f"chaos_{name}")
        return config.getini(f"chaos_{name}") if given is None else given

    try:
        seed, repeats = int(value("seed")), int(value("repeats"))
    except ValueError as error:
        raise pytest.UsageError(
            f"chaos_seed and chaos_repeats must be whole numbers: {error}"
        ) from None
    if repeats < 1:
        raise pytest.UsageError(f"chaos_repeats={repeats}: use 1 or more")
    try:
        lacking = unavailable(value("substrate"))
    except BadInput as error:
        raise pytest.UsageError(f"chaos_{error}") from None
    if lacking:
        raise pytest.UsageError(
            f"chaos_substrate={value('substrate')!r}: use another one: {lacking}"
        )
    report = value("report")
    if report:
        from chaoskit.process.host_checks import require_writable

        try:
            require_writable("chaos_report", Path(report))
        except BadInput as error:
            raise pytest.UsageError(str(error)) from None
    forced = frozenset(
        name
        for name in ("substrate", "seed", "repeats")
        if config.getoption(f"chaos_{name}") is not None
    )
    place = Path(report).resolve() if report else None
    detection = config.getini("chaos_detection")
    if detection not in DETECTION:
        raise pytest.UsageError(f"chaos_detection={detection!r}: use one of {', '.join(DETECTION)}")
    image = value("docker_image")
    return _Settings(
        forced, value("substrate"), seed, repeats, place, image, detection, _session(config)
    )


def _session(config: pytest.Config) -> str:
    """The name of this session: when it began, and in which process. Under xdist, that of the controller."""
    now = datetime.now(UTC).astimezone()
    theirs = getattr(config, "workerinput", {}).get(_SESSION_INPUT)
    return str(theirs) if theirs else f"{now:%Y%m%d-%H%M%S}-{os.getpid()}"


# -- collection ---------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse markers ``sla`` that promise nothing, before a test runs."""
    for item in items:
        try:
            _sla(item)
        except BadInput as error:
            raise pytest.UsageError(f"{item.nodeid}: marker sla: {error}") from None


def _sla(item: pytest.Item) -> dict[str, Any] | None:
    """What the marker ``sla`` of a test says, in a form that xdist carries; None where it has none. Raises BadInput."""
    markers = list(
        item.iter_markers("sla")
    )  # the closest first; those of its class and its module promise, too
    if not markers:
        return None
    from chaoskit.report.statistics import without_repeat
    from chaoskit.sla.promises import of_marker

    name, lines = without_repeat(item.nodeid), [line for marker in markers for line in marker.args]
    options = {name: value for marker in reversed(markers) for name, value in marker.kwargs.items()}
    of_marker(name, lines, options)
    return {"name": name, "lines": lines, "options": options}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every chaos test its repeats."""
    if "chaos" not in metafunc.fixturenames:
        return
    settings = metafunc.config.stash[_settings_key]
    asked = _asked(metafunc.definition)
    repeats = (
        settings.repeats if "repeats" in settings.forced else asked.get("repeats", settings.repeats)
    )
    if repeats > 1:
        metafunc.fixturenames.append("_chaos_repeat")
        metafunc.parametrize(
            "_chaos_repeat", range(repeats), ids=[f"repeat{number}" for number in range(repeats)]
        )


def _asked(item: pytest.Item) -> dict[str, Any]:
    """What the marker ``chaos`` of a test says.

    Raises:
        CollectError: if it says what cannot be.
    """
    marker = item.get_closest_marker("chaos")
    asked = dict(marker.kwargs) if marker is not None else {}
    try:
        if marker is not None and marker.args:
            raise BadInput("chaos", marker.args[0], "give each value a name, such as nodes=2")
        _require_own(asked)
    except BadInput as error:
        raise pytest.Collector.CollectError(f"{item.nodeid}: marker chaos: {error}") from None
    return asked


def _require_own(asked: dict[str, Any]) -> None:
    """Refuse what a marker cannot ask of the plugin. Raises BadInput."""
    for name in ("repeats", "definition"):
        if name in asked and convert(name, asked[name], int) < 1:
            raise BadInput(name, asked[name], "use a whole number, 1 or more")
    for name, choices in (("substrate", names()), ("detection", tuple(DETECTION))):
        given = convert(name, asked.get(name, choices[0]), str)
        if given not in choices and not (name == "substrate" and ":" in given):
            raise BadInput(name, given, f"use one of {', '.join(choices)}")


# -- fixtures -----------------------------------------------------------------------------------------------------


class Stock:
    """The hosts of the session and a harness on each, made when a test needs them and kept warm over all tests.

    Args:
        directory: where runs leave journals and logs.
        docker_image: see :func:`chaoskit.substrate.registry.make`.
    """

    def __init__(self, directory: Path, docker_image: str = "") -> None:
        self._directory, self._docker_image = directory, docker_image
        self._hosts: dict[str, ExperimentHost] = {}
        self._harnesses: dict[str, Harness] = {}

    def harness(self, name: str) -> Harness:
        """The harness on the substrate of that name."""
        from chaoskit.experiment.harness import Harness
        from chaoskit.experiment.remote.host import make_host

        if name not in self._harnesses:
            self._hosts[name] = make_host(name, docker_image=self._docker_image)
            self._harnesses[name] = Harness(self._hosts[name], self._directory)
        return self._harnesses[name]

    def close(self) -> None:
        """End everything."""
        for harness in self._harnesses.values():
            harness.close()
        for host in self._hosts.values():
            host.close()


@pytest.fixture(scope="session")
def chaos_stock(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stock]:
    """What tests of the session share."""
    settings = pytestconfig.stash[_settings_key]
    report = settings.report
    worker = getattr(pytestconfig, "workerinput", {}).get("workerid", "")
    directory = report / "runs" / worker if report else tmp_path_factory.mktemp("chaos")
    stock = Stock(directory, settings.docker_image)
    yield stock
    stock.close()


@pytest.fixture
def chaos(request: pytest.FixtureRequest, chaos_stock: Stock) -> Chaos:
    """Runs training jobs and breaks them. See :meth:`Chaos.run`. Skips where a test's substrate is not to be had."""
    settings = request.config.stash[_settings_key]
    defaults = {"seed": settings.seed, **_asked(request.node)}
    defaults.pop("repeats", None)
    defaults.pop("definition", None)
    if "seed" in settings.forced:
        defaults["seed"] = settings.seed
    limits = dict(DETECTION[defaults.pop("detection", settings.detection)])
    wanted = defaults.pop("substrate", settings.substrate)
    substrate = settings.substrate if "substrate" in settings.forced else wanted
    if reason := unavailable(substrate):
        pytest.skip(f"substrate {substrate}: {reason}")
    made = Chaos(
        chaos_stock.harness(substrate), request.node, defaults, limits, session=settings.session
    )
    request.node.stash[_chaos_key] = made
    return made


@pytest.fixture
def rules_fire(request: pytest.FixtureRequest) -> Callable[..., list[Fired]]:
    """Log rules on a recorded log: ``assert not rules_fire("rules.yaml", "train.log")``.

    As :func:`chaoskit.check_log_rules`; relative files are looked up beside the test, then in the working directory.
    """
    from chaoskit.rules import check_log_rules

    def locate(file: Any) -> Any:
        return _beside(request.path, file) if isinstance(file, (str, Path)) else file

    return lambda rules, log, **options: check_log_rules(locate(rules), locate(log), **options)


def _beside(test: Path, file: str | Path) -> str | Path:
    """``file`` beside the test, if it is there."""
    beside = test.parent / file
    return beside if beside.is_file() else file


@dataclass
class Chaos:
    """What the fixture ``chaos`` gives to a test.

    Attributes:
        defaults: of every run of the test.
        limits: further defaults for jobs: the limits of detection, and what a suite adds. A command has its own.
        session: name of the pytest session.
    """

    harness: Harness
    item: pytest.Item
    defaults: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    session: str = ""

    def run(
        self,
        job: str | None = None,
        *,
        command: Sequence[str] | None = None,
        faults: Sequence[Fault] = (),
        check: bool = True,
        **plan: Any,
    ) -> Outcome:
        """Run ``job``, or any ``command``, break it, and judge it against the unbroken run.

        Args:
            job: a reference job (``gpt``), a file, or ``file.py:function``. A relative file is looked up beside the
                test, then in the working directory.
            command: a command instead, such as ``["torchrun", "train.py"]``, of which ``watch=LogPatterns(...)`` says
                how its log shows steps. Python files are looked up in the same way.
            faults: what to break.
            check: fail the test unless the verdict is ``passed``; ``False`` only returns the outcome, which then counts
                neither for nor against the recovery probability of the report.
            plan: ``steps``, ``nodes``, ``spares``, ``seed``, ``options``, ``deadline_s``, ``max_lost_steps``, ``twin``,
                ``reference`` and every other field of :class:`chaoskit.config.RunConfig`. Of a command: ``watch``,
                ``nodes``, ``ranks``, ``rules``, ``seed``, ``working_directory``, ``deadline_s``, ``stalled_s``,
                ``max_lost_steps``, ``twin``.

        Raises:
            BadInput: before anything is started. VerdictError: the verdict is not ``passed``.
            HarnessError: chaoskit itself failed.
        """
        __tracebackhide__ = methodcaller(
            "errisinstance", VerdictError
        )  # other errors show where they come from
        from chaoskit.history.record import new_id
        from chaoskit.report.junit import junit_properties
        from chaoskit.report.store import write_outcome
        from chaoskit.stacks.command import require_command

        job, check = convert("job", job, str | None), convert("check", check, bool)
        number = f" #{len(self.outcomes) + 1}" if self.outcomes else ""
        limits = self.limits if command is None else {}
        settings = {"name": f"{self.item.name}{number}", **limits, **self.defaults, **plan}
        if job is not None:
            job = self._locate(job)
        if isinstance(settings.get("rules"), (str, Path)):
            settings["rules"] = _beside(self.item.path, settings["rules"])
        if command is not None:
            command = [self._locate(argument) for argument in require_command(command)]
        outcome = self.harness.run(job, command=command, faults=faults, **settings)
        outcome.claimed, outcome.session, outcome.run_id = check, self.session, new_id()
        self.outcomes.append(outcome)
        write_outcome(outcome, Path(outcome.directory))
        if check:
            self.item.user_properties.extend(junit_properties(outcome))
            if outcome.verdict != Verdict.PASSED:
                raise VerdictError(outcome)
        return outcome

    def _locate(self, job: str) -> str:
        path, _, function = job.partition(":")
        beside = self.item.path.parent / path
        if path.endswith(".py") and beside.is_file():
            return f"{beside}:{function}" if function else str(beside)
        return job


# -- verdicts -----------------------------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write the verdict of a failed test into its report, where xdist carries it to the controller."""
    yielded: Any = yield
    report: pytest.TestReport = yielded.get_result()
    if report.when == "call":
        _note_test(item, call)
    told: Any = report  # xdist carries what is added to it
    told.chaoskit_records = _lines(item)
    if report.when == "call":
        told.chaoskit_sla = _sla(item)
    if call.excinfo is None or not report.failed:
        return
    error = call.excinfo.value
    if isinstance(error, VerdictError):
        verdict = error.outcome.verdict
        report.longrepr = _with_notes(_brief(error.outcome), error)
    elif isinstance(error, HarnessError):
        verdict = Verdict.ERROR
        if not item.config.getoption("chaos_traceback"):
            line = f"chaoskit failed: {error_line(error)} (--chaos-traceback shows more)"
            if isinstance(error, CommandFailed):
                line = f"no verdict: {error_line(error)}"
            report.longrepr = printable("\n".join([line, *long_notes(error)]))
    elif isinstance(error, BadInput):
        report.longrepr = _with_notes(
            f"bad input: {error}{_line_of_test(item, call.excinfo)}", error
        )
        report.user_properties.append((_VERDICT_PROPERTY + ".worst", _BAD_INPUT))
        return
    else:
        verdict = Verdict.FAILED
    report.user_properties.append((_VERDICT_PROPERTY + ".worst", verdict.value))


def _line_of_test(item: pytest.Item, raised: pytest.ExceptionInfo[BaseException]) -> str:
    """Return the place in the file of the test from which an error comes; "" where it comes from elsewhere."""
    lines = [entry.lineno + 1 for entry in raised.traceback if Path(entry.path) == item.path]
    return f" ({item.path.name}:{lines[-1]})" if lines else ""


def _note_test(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Write into the outcomes of a test how it ended: a run that passed may be one of a test that did not."""
    from chaoskit.report.store import write_outcome
    from chaoskit.runlog.outcome import TestResult

    chaos = item.stash.get(_chaos_key, None)
    if chaos is None:
        return
    error = call.excinfo.value if call.excinfo is not None else None
    failed = error is not None and not isinstance(error, (VerdictError, pytest.skip.Exception))
    message = f"{type(error).__name__}: {error}".partition("\n")[0] if failed else ""
    for outcome in chaos.outcomes:
        outcome.test = TestResult(nodeid=item.nodeid, failed=failed, message=message)
        write_outcome(outcome, Path(outcome.directory))


def _lines(item: pytest.Item) -> list[str]:
    """Records of the runs of a test, where any are kept: xdist carries them to the controller with the report."""
    sources, chaos = item.config.stash.get(_sources_key, None), item.stash.get(_chaos_key, None)
    if chaos is None or (sources is None and item.get_closest_marker("sla") is None):
        return []
    from chaoskit.history.place import sources_at
    from chaoskit.history.session import lines_of

    if sources is None:
        sources = item.config.stash[_sources_key] = sources_at(item.config.rootpath)

    return lines_of(chaos.outcomes, sources, item.nodeid, _asked(item).get("definition", 1))


def _brief(outcome: Outcome) -> str:
    """Return the cause of a failure, what became of the faults, and where to look."""
    lines = [
        f"chaoskit verdict: {outcome.verdict.value}",
        *(f"  - {reason}" for reason in outcome.reasons),
    ]
    lines += [f"  {fault.fault}: {fault.state}" for fault in outcome.faults]
    lines += [f"  {line}" for end in outcome.log_ends for line in str(end).splitlines()]
    return printable("\n".join([*lines, f"  journals and logs: {outcome.directory}"]))


def _with_notes(text: str, error: BaseException) -> str:
    """Add the notes of an error, such as the values that Hypothesis found."""
    notes = getattr(error, "__notes__", [])
    return "\n".join(
        [text, *(f"  {line}" for note in notes for line in printable(note).splitlines())]
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist the name of the session."""
    node.workerinput[_SESSION_INPUT] = node.config.stash[_settings_key].session


class _Tally:
    """Collects verdicts over the session, in xdist's controller too, and turns them into the exit status."""

    def __init__(self, settings: _Settings, records: SessionRecords | None) -> None:
        self._settings, self._records = settings, records
        self._comparison: RunComparison | None = None
        self._slas: dict[str, dict[str, Any]] = {}  # by test
        self._judged: list[Judged] = []
        self._failures: list[Verdict] = []
        self._refused = False  # a test failed because of bad input

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._take_records(report)
        found = [
            value for name, value in report.user_properties if name == _VERDICT_PROPERTY + ".worst"
        ]
        if report.failed and found and found[-1] == _BAD_INPUT:
            self._refused = True
        elif report.failed:
            self._failures.append(Verdict(str(found[-1])) if found else Verdict.FAILED)

    def _take_records(self, report: Any) -> None:
        if (sla := getattr(report, "chaoskit_sla", None)) is not None:
            self._slas[sla["name"]] = sla
            if self._records is None:
                from chaoskit.history.session import SessionRecords

                self._records = SessionRecords("", None, "")
        if self._records is not None:
            self._records.take(getattr(report, "chaoskit_records", ()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.TESTS_FAILED and self._failures:
            session.exitstatus = Verdict.worst(self._failures).exit_code
        elif exitstatus == pytest.ExitCode.TESTS_FAILED and self._refused:
            session.exitstatus = (
                pytest.ExitCode.INTERRUPTED
            )  # 2, as every command says of bad input
        if self._records is not None and not hasattr(session.config, "workerinput"):
            is_strict = session.config.getoption("chaos_strict")
            self._judged = self._judge(self._records) if self._slas else []
            self._comparison = self._records.finish(
                is_well=session.exitstatus == pytest.ExitCode.OK
            )
            session.exitstatus = self._with_slas(
                self._compared(int(session.exitstatus), is_strict), is_strict
            )
            self._summarise(session.config)

    def _compared(self, status: int, is_strict: bool) -> int:
        """The exit status with what the comparison says. One that had nothing to look at is never well."""
        assert self._records is not None
        compared, unknown = self._comparison, Verdict.UNKNOWN.exit_code
        if status not in (pytest.ExitCode.OK, unknown):
            return status
        if self._records.has_failed:  # a baseline, a file or a history was not written
            return Verdict.ERROR.exit_code if self._records.runs else unknown
        if compared is None and self._records.is_first:
            return unknown if is_strict or not self._records.runs else status
        if compared is None:
            return status
        if compared.is_regressed:
            return Verdict.FAILED.exit_code
        return unknown if not compared.findings or (is_strict and compared.is_open) else status

    def _summarise(self, config: pytest.Config) -> None:
        """Add the comparison to the file of ``--chaos-summary``; of a first session, what was recorded."""
        from chaoskit.history.faces import cell, markdown

        file = config.getoption("chaos_summary")
        if not file or self._records is None:
            return
        if self._comparison is not None:
            told = markdown(self._comparison)
        else:
            lines = [f"### chaoskit: {self._recorded(self._records, config)}", ""]
            told = "\n".join([*lines, *(f"- {cell(line)}" for line in self._records.troubles), ""])
        with Path(file).open("a", encoding="utf-8") as summary:
            summary.write(told)

    def _judge(self, records: SessionRecords) -> list[Judged]:
        """What the records show of the SLAs of tests."""
        from chaoskit.sla.judge import Judged, State, judge
        from chaoskit.sla.promises import of_marker

        everything, today = records.everything(), datetime.now(UTC).date()
        judged = []
        for name, sla in self._slas.items():
            runs = [run for run in everything.runs if run.title.partition(" #")[0] == name]
            try:
                judged += judge(
                    of_marker(name, sla["lines"], sla["options"]),
                    runs,
                    everything.plans,
                    today=today,
                )
            except BadInput as error:
                told = error.remedy if runs else "no run was recorded"
                judged.append(
                    Judged(sla=name, line=", ".join(sla["lines"]), state=State.UNKNOWN, reason=told)
                )
        return judged

    def _with_slas(self, status: int, is_strict: bool) -> int:
        """The exit status with what the records show of SLAs."""
        if not self._judged or status not in (pytest.ExitCode.OK, Verdict.UNKNOWN.exit_code):
            return status
        from chaoskit.sla.judge import exit_code

        return exit_code(self._judged, is_strict=is_strict) or status

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        if hasattr(config, "workerinput"):
            return
        if self._records is not None:
            self._show_records(self._records, terminalreporter, config)
        if self._settings.report is not None:
            self._show_report(self._settings.report, terminalreporter)

    def _recorded(self, records: SessionRecords, config: pytest.Config) -> str:
        """Return how many runs were recorded, and what they were compared with, or will be."""
        from chaoskit.history.faces import comparison_sentence
        from chaoskit.plaintext import plural

        compared, against = self._comparison, config.getoption("chaos_compare")
        told = f"{plural(records.runs, 'run')} recorded"
        if compared is not None:
            return f"{told}; compared with {against}: {comparison_sentence(compared)}"
        if not records.is_first:
            return told
        later = f": later sessions are compared with {against}" if records.is_compared_next else ""
        return f"{told}; nothing to compare with yet{later}"

    def _show_records(
        self,
        records: SessionRecords,
        terminalreporter: pytest.TerminalReporter,
        config: pytest.Config,
    ) -> None:
        from chaoskit.history.faces import render_comparison, told_first
        from chaoskit.report.terminal import Terminal

        compared = self._comparison
        terminalreporter.write_sep("=", "chaoskit history")
        for line in [self._recorded(records, config), *records.troubles]:
            terminalreporter.write_line(printable(line))
        if compared is not None and told_first(compared):
            Terminal().print(render_comparison(compared))
        if self._judged:
            from chaoskit.sla.faces import render_sla, sla_sentence

            terminalreporter.write_line(f"SLAs: {sla_sentence(self._judged)}")
            Terminal().print(render_sla(self._judged))

    def _show_report(self, report: Path, terminalreporter: pytest.TerminalReporter) -> None:
        from chaoskit.plaintext import plural
        from chaoskit.report.html import write_html
        from chaoskit.report.statistics import estimate_recovery
        from chaoskit.report.store import read_outcomes
        from chaoskit.report.summary import recovery_sentence

        try:
            everything = read_outcomes(report)
        except BadInput:
            return  # no chaos test ran
        ours = [outcome for outcome in everything if outcome.session == self._settings.session]
        if not ours:
            return
        page = report / "report.html"
        write_html(everything, page)
        others = len(everything) - len(ours)
        more = f", with {plural(others, 'run')} of other sessions" if others else ""
        terminalreporter.write_sep("=", f"chaoskit: {plural(len(ours), 'run')}, {page}{more}")
        total = estimate_recovery(ours).total
        if total.runs:
            terminalreporter.write_line(recovery_sentence(total))
