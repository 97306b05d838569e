"""Pytest plugin of chaoskit: fixture ``chaos``, markers, options, and exit codes for verdicts.

    def test_losing_a_rank_costs_nothing(chaos):
        outcome = chaos.run("gpt", nodes=4, steps=60, faults=[Kill(rank=2, at_step=20)])
        assert outcome.recovery.seconds < 0.5

Torch and the harness are imported when a test uses ``chaos``, so that an installed chaoskit slows
no other suite.

-> ``experiment/harness.py`` runs the experiment. ``experiment/judge/judge.py``: how the verdict is
reached. ``history/session.py``: the records of a session.
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
    from chaoskit.attach.twin.cache import JobTwins
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
    """An outcome that is not ``passed``. The error carries the outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        reasons = printable(
            "; ".join(outcome.reasons)
        )  # pytest writes the text to the terminal as it is
        super().__init__(f"{outcome.verdict.value}: {reasons} (journals: {outcome.directory})")


# -- options ---------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and ini values of chaoskit."""
    group = parser.getgroup("chaoskit", "fault injection for distributed training")
    group.addoption(
        "--chaos-substrate",
        default=None,
        help="substrate that provides the nodes (default: that of the test's marker, else local)",
    )
    group.addoption(
        "--chaos-docker-image",
        metavar="IMAGE",
        default=None,
        help="image with chaoskit in it, for the substrate docker (default: $CHAOSKIT_DOCKER_IMAGE, else this Python)",
    )
    group.addoption(
        "--chaos-attach",
        metavar="KIND/NAME",
        default=None,
        help="job that runs already on Kubernetes, for tests with chaos.attach, such as statefulset/llama",
    )
    group.addoption(
        "--chaos-watch",
        metavar="FILE",
        default=None,
        help="YAML or TOML with the patterns of that job's log: step, and loss if losses matter",
    )
    group.addoption(
        "--chaos-twin",
        metavar="FILE",
        default=None,
        help="YAML with the manifests of a second job of the same training, which runs after each test with "
        "chaos.attach, and whose losses are compared",
    )
    group.addoption(
        "--chaos-namespace",
        metavar="NAME",
        default=None,
        help="namespace of that job (default: $CHAOSKIT_KUBERNETES_NAMESPACE, else that of the context)",
    )
    group.addoption(
        "--chaos-hand-image",
        metavar="IMAGE",
        default=None,
        help="image of hands, which act in the pods of that job (default: $CHAOSKIT_HAND_IMAGE)",
    )
    group.addoption(
        "--chaos-exec-hands",
        action="store_true",
        default=None,
        help="start hands on processes by exec in the container that trains, where no image can be pulled",
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
        help="compare with the records in FILE, or in a history; the session fails if a result got worse. If FILE does "
        "not exist, the records of this session are written to it",
    )
    group.addoption(
        "--chaos-tolerance",
        metavar="SHARE",
        type=float,
        default=None,
        help="share by which a duration may grow before it counts as worse (default: 0.25)",
    )
    group.addoption(
        "--chaos-strict",
        action="store_true",
        default=False,
        help="exit with 10 if a comparison is undecided, or has no earlier records",
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
        "limits after which a rank or a node counts as lost, unless a test names them: 'production', or 'relaxed' "
        "for machines that are shared with other work",
        default="production",
    )
    parser.addini(
        "chaos_substrate",
        "substrate that provides the nodes, unless a test names another one",
        default="local",
    )
    parser.addini(
        "chaos_docker_image", "image with chaoskit in it, for the substrate docker", default=""
    )
    parser.addini("chaos_seed", "seed of every run", default="0")
    parser.addini("chaos_repeats", "number of runs of each chaos test", default="1")
    parser.addini("chaos_history", "store for a record of every run: a folder or a URL", default="")
    parser.addini("chaos_report", "directory for outcomes, journals and the HTML page", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, check the options, and set up the records of the session."""
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
    config.pluginmanager.register(_SessionVerdicts(settings, _records(config)), "chaoskit-tally")


_TEXT_OPTIONS = (
    "substrate",
    "docker_image",
    "attach",
    "watch",
    "twin",
    "namespace",
    "hand_image",
    "save",
    "compare",
    "summary",
    "report",
)


def _require_values(config: pytest.Config) -> None:
    """Raise UsageError for empty options, such as ``--chaos-report "$DIR"`` with an unset variable.

    An empty ``--chaos-history`` turns off the store that an ini file names.
    """
    for name in _TEXT_OPTIONS:
        if config.getoption(f"chaos_{name}") == "":
            raise pytest.UsageError(
                f"--chaos-{name.replace('_', '-')}='': give it a value, or leave it out"
            )


def _absolute(place: str | None, base: Path) -> str:
    """Return an absolute place, because a test may change the working directory.

    URLs stay as they are.
    """
    return place if place and "://" in place else str(base / place) if place else ""


@dataclass(frozen=True)
class _Settings:
    """The settings of the session, from options and ini values.

    Attributes:
        forced: the settings that the command line gives. They override the marker of a test.
        attach: the arguments of ``chaos.attach`` that the command line gives.
        session: the name of the session, which distinguishes its runs from others in the same
            report directory.
    """

    forced: frozenset[str]
    substrate: str
    seed: int
    repeats: int
    report: Path | None
    docker_image: str
    detection: str
    session: str
    attach: dict[str, Any]


_settings_key = pytest.StashKey[_Settings]()
_sources_key = pytest.StashKey[Any]()
_chaos_key = pytest.StashKey["Chaos"]()


def _records(config: pytest.Config) -> SessionRecords | None:
    """Return the records of this session; None if none are asked for.

    Under xdist the controller keeps them. Raise UsageError if an option is invalid.
    """
    options: dict[str, Any] = {
        name: config.getoption(f"chaos_{name}")
        for name in ("save", "compare", "tolerance", "summary")
    }
    store = config.getoption("chaos_history") or config.getini("chaos_history")
    if not options["compare"] and (options["summary"] or options["tolerance"] is not None):
        raise pytest.UsageError("--chaos-summary and --chaos-tolerance: give --chaos-compare, too")
    if config.getoption("collectonly") or not (store or options["save"] or options["compare"]):
        return None
    if options["tolerance"] is not None and not 0 < options["tolerance"] < 10:
        raise pytest.UsageError(
            f"--chaos-tolerance={options['tolerance']}: use a share above 0, such as 0.1"
        )
    from chaoskit.history.place import sources_at

    config.stash[_sources_key] = sources_at(config.rootpath)
    if hasattr(config, "workerinput"):
        return None
    from chaoskit.history.compare import TOLERANCE
    from chaoskit.history.session import SessionRecords
    from chaoskit.process.host_checks import require_writable

    paths = {name: _absolute(options[name], Path.cwd()) for name in ("save", "compare", "summary")}
    store = _absolute(store, Path.cwd() if config.getoption("chaos_history") else config.rootpath)
    if paths["save"] and paths["save"] == paths["compare"]:
        raise pytest.UsageError(
            "--chaos-save and --chaos-compare: use two files: otherwise a worse result is the next reference"
        )
    try:
        for name, path in paths.items():
            if path and "://" not in path and not (name == "compare" and Path(path).exists()):
                require_writable(f"chaos_{name}", Path(path).parent)
                if Path(path).is_dir():
                    raise BadInput(f"chaos_{name}", path, "name a file")
        save = Path(paths["save"]) if paths["save"] else None
        return SessionRecords(store, save, paths["compare"], options["tolerance"] or TOLERANCE)
    except BadInput as error:
        raise pytest.UsageError(str(error)) from None


def _settings(config: pytest.Config) -> _Settings:
    """Return the settings of the session. Raise UsageError if a setting is invalid."""

    def setting(name: str) -> Any:
        option = config.getoption(f"chaos_{name}")
        return config.getini(f"chaos_{name}") if option is None else option

    try:
        seed, repeats = int(setting("seed")), int(setting("repeats"))
    except ValueError as error:
        raise pytest.UsageError(
            f"chaos_seed and chaos_repeats must be whole numbers: {error}"
        ) from None
    if repeats < 1:
        raise pytest.UsageError(f"chaos_repeats={repeats}: use 1 or more")
    try:
        reason = unavailable(setting("substrate"))
    except BadInput as error:
        raise pytest.UsageError(f"chaos_{error}") from None
    if reason:
        raise pytest.UsageError(
            f"chaos_substrate={setting('substrate')!r}: use another one: {reason}"
        )
    report = setting("report")
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
    report_directory = Path(report).resolve() if report else None
    detection = config.getini("chaos_detection")
    if detection not in DETECTION:
        raise pytest.UsageError(f"chaos_detection={detection!r}: use one of {', '.join(DETECTION)}")
    image = setting("docker_image")
    return _Settings(
        forced,
        setting("substrate"),
        seed,
        repeats,
        report_directory,
        image,
        detection,
        _session(config),
        _attach_arguments(config),
    )


def _attach_arguments(config: pytest.Config) -> dict[str, Any]:
    """Return the arguments of ``chaos.attach`` that the command line gives."""
    files = {name: config.getoption(f"chaos_{name}") for name in ("watch", "twin")}
    arguments = {
        "job": config.getoption("chaos_attach"),
        **{name: Path(file).resolve() for name, file in files.items() if file},
        "namespace": config.getoption("chaos_namespace"),
        "image": config.getoption("chaos_hand_image"),
        "exec_hands": config.getoption("chaos_exec_hands"),
    }
    return {name: argument for name, argument in arguments.items() if argument is not None}


def _session(config: pytest.Config) -> str:
    """Return the name of this session: its start and its process.

    Under xdist it is that of the controller.
    """
    now = datetime.now(UTC).astimezone()
    controller_session = getattr(config, "workerinput", {}).get(_SESSION_INPUT)
    return str(controller_session) if controller_session else f"{now:%Y%m%d-%H%M%S}-{os.getpid()}"


# -- collection ------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise UsageError for invalid markers ``sla``, before a test runs."""
    for item in items:
        try:
            _sla(item)
        except BadInput as error:
            raise pytest.UsageError(f"{item.nodeid}: marker sla: {error}") from None


def _sla(item: pytest.Item) -> dict[str, Any] | None:
    """Return the marker ``sla`` of a test in a form that xdist carries; None if it has none.

    Raises:
        BadInput: if the marker is invalid.
    """
    markers = list(
        item.iter_markers("sla")
    )  # the closest marker comes first; those of its class and its module apply, too
    if not markers:
        return None
    from chaoskit.report.statistics import without_repeat
    from chaoskit.sla.promises import parse_marker

    name, lines = without_repeat(item.nodeid), [line for marker in markers for line in marker.args]
    options = {
        name: option for marker in reversed(markers) for name, option in marker.kwargs.items()
    }
    parse_marker(name, lines, options)
    return {"name": name, "lines": lines, "options": options}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize chaos tests with their repeats."""
    if "chaos" not in metafunc.fixturenames:
        return
    settings = metafunc.config.stash[_settings_key]
    arguments = _chaos_arguments(metafunc.definition)
    repeats = (
        settings.repeats
        if "repeats" in settings.forced
        else arguments.get("repeats", settings.repeats)
    )
    if repeats > 1:
        metafunc.fixturenames.append("_chaos_repeat")
        metafunc.parametrize(
            "_chaos_repeat", range(repeats), ids=[f"repeat{number}" for number in range(repeats)]
        )


def _chaos_arguments(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of a test's marker ``chaos``.

    Raises:
        CollectError: if an argument is invalid.
    """
    marker = item.get_closest_marker("chaos")
    arguments = dict(marker.kwargs) if marker is not None else {}
    try:
        if marker is not None and marker.args:
            raise BadInput("chaos", marker.args[0], "give each value a name, such as nodes=2")
        _require_plugin_arguments(arguments)
    except BadInput as error:
        raise pytest.Collector.CollectError(f"{item.nodeid}: marker chaos: {error}") from None
    return arguments


def _require_plugin_arguments(arguments: dict[str, Any]) -> None:
    """Raise BadInput if an argument of a marker that is meant for the plugin is invalid."""
    for name in ("repeats", "definition"):
        if name in arguments and convert(name, arguments[name], int) < 1:
            raise BadInput(name, arguments[name], "use a whole number, 1 or more")
    for name, choices in (("substrate", names()), ("detection", tuple(DETECTION))):
        choice = convert(name, arguments.get(name, choices[0]), str)
        if choice not in choices and not (name == "substrate" and ":" in choice):
            raise BadInput(name, choice, f"use one of {', '.join(choices)}")


# -- fixtures --------------------------------------------------------------------------------------


class Stock:
    """The hosts of the session with a harness on each.

    They are made on demand and kept warm over all tests.

    Args:
        directory: the directory in which runs leave journals and logs.
        docker_image: see :func:`chaoskit.substrate.registry.make`.

    Attributes:
        job_twins: results of second jobs, which later tests with ``chaos.attach`` use again.
    """

    def __init__(self, directory: Path, docker_image: str = "") -> None:
        from chaoskit.attach.twin.cache import JobTwins

        self.job_twins = JobTwins()
        self._directory, self._docker_image = directory, docker_image
        self._hosts: dict[str, ExperimentHost] = {}
        self._harnesses: dict[str, Harness] = {}

    def harness(self, name: str) -> Harness:
        """Return the harness on the substrate of that name, which is made at the first call.

        Raises BadInput if there is no such substrate, or this machine does not support it.
        """
        from chaoskit.experiment.harness import Harness
        from chaoskit.experiment.remote.host import make_host

        if name not in self._harnesses:
            self._hosts[name] = make_host(name, docker_image=self._docker_image)
            self._harnesses[name] = Harness(self._hosts[name], self._directory)
        return self._harnesses[name]

    def close(self) -> None:
        """Close all harnesses and hosts."""
        for harness in self._harnesses.values():
            harness.close()
        for host in self._hosts.values():
            host.close()


@pytest.fixture(scope="session")
def chaos_stock(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stock]:
    """The hosts and harnesses that all tests of the session share."""
    settings = pytestconfig.stash[_settings_key]
    report = settings.report
    worker = getattr(pytestconfig, "workerinput", {}).get("workerid", "")
    directory = report / "runs" / worker if report else tmp_path_factory.mktemp("chaos")
    stock = Stock(directory, settings.docker_image)
    yield stock
    stock.close()


@pytest.fixture
def chaos(request: pytest.FixtureRequest, chaos_stock: Stock) -> Chaos:
    """Run training jobs with faults. See :meth:`Chaos.run`.

    A test is skipped if its substrate is not available.
    """
    settings = request.config.stash[_settings_key]
    defaults = {"seed": settings.seed, **_chaos_arguments(request.node)}
    defaults.pop("repeats", None)
    defaults.pop("definition", None)
    if "seed" in settings.forced:
        defaults["seed"] = settings.seed
    limits = dict(DETECTION[defaults.pop("detection", settings.detection)])
    requested = defaults.pop("substrate", settings.substrate)
    substrate = settings.substrate if "substrate" in settings.forced else requested
    if reason := unavailable(substrate):
        pytest.skip(f"substrate {substrate}: {reason}")
    chaos_of_test = Chaos(
        chaos_stock.harness(substrate),
        request.node,
        defaults,
        limits,
        session=settings.session,
        attach_arguments=settings.attach,
        job_twins=chaos_stock.job_twins,
    )
    request.node.stash[_chaos_key] = chaos_of_test
    return chaos_of_test


@pytest.fixture
def rules_fire(request: pytest.FixtureRequest) -> Callable[..., list[Fired]]:
    """Run log rules on a recorded log: ``assert not rules_fire("rules.yaml", "train.log")``.

    The arguments are those of :func:`chaoskit.check_log_rules`. Relative files are looked up beside
    the test, then in the working directory.
    """
    from chaoskit.rules import check_log_rules

    def locate(file: Any) -> Any:
        return _beside_test(request.path, file) if isinstance(file, (str, Path)) else file

    return lambda rules, log, **options: check_log_rules(locate(rules), locate(log), **options)


def _beside_test(test: Path, file: str | Path) -> str | Path:
    """Return the path of ``file`` beside the test if it exists there, else ``file``."""
    beside = test.parent / file
    return beside if beside.is_file() else file


@dataclass
class Chaos:
    """The value of the fixture ``chaos``.

    Attributes:
        defaults: default arguments for every run of the test.
        limits: further defaults for jobs: the limits of detection, and those that a suite adds.
            They do not apply to commands.
        outcomes: the outcomes of the runs so far.
        session: the name of the pytest session.
        attach_arguments: arguments of :meth:`attach` that the command line gives.
        job_twins: results of second jobs so far in the session; None to begin without any.
    """

    harness: Harness
    item: pytest.Item
    defaults: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    session: str = ""
    attach_arguments: dict[str, Any] = field(default_factory=dict)
    job_twins: JobTwins | None = None

    def run(
        self,
        job: str | None = None,
        *,
        command: Sequence[str] | None = None,
        faults: Sequence[Fault] = (),
        check: bool = True,
        **plan: Any,
    ) -> Outcome:
        """Run ``job``, or any ``command``, inject faults, and compare it with the unbroken run.

        Return the outcome, which is also added to ``outcomes`` and written to its directory. Either
        ``job`` or ``command`` must be given.

        Args:
            job: a reference job (``gpt``), a file, or ``file.py:function``. A relative file is
                looked up beside the test, then in the working directory.
            command: a command instead of a job, such as ``["torchrun", "train.py"]``.
                ``watch=LogPatterns(...)`` defines how its log shows steps. Python files are looked
                up in the same way.
            faults: the faults to inject.
            check: fail the test unless the verdict is ``passed``. ``False`` only returns the
                outcome, which then does not count for the recovery probability of the report.
            plan: ``steps``, ``nodes``, ``spares``, ``seed``, ``options``, ``deadline_s``,
                ``max_lost_steps``, ``twin``, ``reference`` and every other field of
                :class:`chaoskit.config.RunConfig`. For a command: ``watch``, ``nodes``, ``ranks``,
                ``rules``, ``seed``, ``working_directory``, ``deadline_s``, ``stalled_s``,
                ``max_lost_steps``, ``twin``.

        Raises:
            BadInput: before anything is started, or when the job refuses its input.
            VerdictError: if the verdict is not ``passed``, unless ``check`` is False.
            HarnessError: if chaoskit itself failed, or the unbroken run of a command did.
        """
        __tracebackhide__ = methodcaller(
            "errisinstance", VerdictError
        )  # other errors show their traceback
        from chaoskit.stacks.command import require_command

        job, check = convert("job", job, str | None), convert("check", check, bool)
        limits = self.limits if command is None else {}
        settings = {"name": self._run_name(), **limits, **self.defaults, **plan}
        if job is not None:
            job = self._locate(job)
        if isinstance(settings.get("rules"), (str, Path)):
            settings["rules"] = _beside_test(self.item.path, settings["rules"])
        if command is not None:
            command = [self._locate(argument) for argument in require_command(command)]
        outcome = self.harness.run(job, command=command, faults=faults, **settings)
        self._record(outcome, check=check)
        return outcome

    def attach(
        self, job: str = "", *, faults: Sequence[Fault] = (), check: bool = True, **arguments: Any
    ) -> Outcome:
        """Inject faults into a training that runs already on Kubernetes, and judge it.

        Return the outcome, as :meth:`run` does. The job goes on afterwards. Under xdist, tests of
        one job must have one group.

        Args:
            job: the job, such as ``statefulset/llama``. Default: that of ``--chaos-attach``.
            faults: the faults to inject.
            check: fail the test unless the verdict is ``passed``.
            arguments: ``watch=LogPatterns(...)``, or a file of patterns (default: that of
                ``--chaos-watch``); ``twin``, a file with a second job to compare losses with
                (default: that of ``--chaos-twin``); ``namespace``, ``image`` of the hands,
                ``exec_hands``, ``context``, ``container``, and those of
                :func:`chaoskit.attach.run.plan.attach_settings`.

        Raises:
            BadInput: before anything is broken.
            VerdictError: if the verdict is not ``passed``, unless ``check`` is False.
            HarnessError: if chaoskit itself failed.
        """
        __tracebackhide__ = methodcaller("errisinstance", VerdictError)
        from chaoskit.attach.run.attach import attach

        given = {"job": job} if job else {}
        settings = {"name": self._run_name(), "seed": self.defaults.get("seed", 0)}
        settings |= {**self.attach_arguments, **arguments, **given}
        for name in ("watch", "twin"):
            if settings.get(name) and isinstance(settings[name], (str, Path)):
                settings[name] = _beside_test(self.item.path, settings[name])
        outcome = attach(
            settings.pop("job", ""),
            faults=faults,
            twins=self.job_twins,
            directory=self.harness.directory,
            **settings,
        )
        self._record(outcome, check=check)
        return outcome

    def _run_name(self) -> str:
        """Return the name of the next run of the test."""
        return self.item.name + (f" #{len(self.outcomes) + 1}" if self.outcomes else "")

    def _record(self, outcome: Outcome, *, check: bool) -> None:
        """Keep an outcome and write it to its directory. Raises VerdictError if it did not pass."""
        __tracebackhide__ = methodcaller("errisinstance", VerdictError)
        from chaoskit.history.record import new_id
        from chaoskit.report.junit import junit_properties
        from chaoskit.report.store import write_outcome

        outcome.claimed, outcome.session, outcome.run_id = check, self.session, new_id()
        self.outcomes.append(outcome)
        write_outcome(outcome, Path(outcome.directory))
        if check:
            self.item.user_properties.extend(junit_properties(outcome))
            if outcome.verdict != Verdict.PASSED:
                raise VerdictError(outcome)

    def _locate(self, job: str) -> str:
        """Return the path of a Python file beside the test. Other arguments stay as they are."""
        path, _, function = job.partition(":")
        beside = self.item.path.parent / path
        if path.endswith(".py") and beside.is_file():
            return f"{beside}:{function}" if function else str(beside)
        return job


# -- verdicts --------------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write the verdict of a failed test into its report, which xdist carries to the controller.

    The report also gets the records of the test's runs and its SLA. The text of a failure of
    chaoskit is shortened to one line, unless ``--chaos-traceback`` is given.
    """
    yielded: Any = yield
    report: pytest.TestReport = yielded.get_result()
    if report.when == "call":
        _write_test_result(item, call)
    carried_report: Any = report  # xdist carries its attributes
    carried_report.chaoskit_records = _record_lines(item)
    if report.when == "call":
        carried_report.chaoskit_sla = _sla(item)
    if call.excinfo is None or not report.failed:
        return
    error = call.excinfo.value
    if isinstance(error, VerdictError):
        verdict = error.outcome.verdict
        report.longrepr = _with_notes(_failure_text(error.outcome), error)
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
    """Return the line of the test's file that raised an error; "" if another file did."""
    lines = [frame.lineno + 1 for frame in raised.traceback if Path(frame.path) == item.path]
    return f" ({item.path.name}:{lines[-1]})" if lines else ""


def _write_test_result(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Write the end of a test into its outcomes, as a test may fail although its run passed."""
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


def _record_lines(item: pytest.Item) -> list[str]:
    """Return the records of a test's runs, if any are kept.

    They are lines of JSON, which xdist carries to the controller with the report.
    """
    sources, chaos = item.config.stash.get(_sources_key, None), item.stash.get(_chaos_key, None)
    if chaos is None or (sources is None and item.get_closest_marker("sla") is None):
        return []
    from chaoskit.history.place import sources_at
    from chaoskit.history.session import lines_of

    if sources is None:
        sources = item.config.stash[_sources_key] = sources_at(item.config.rootpath)

    return lines_of(
        chaos.outcomes, sources, item.nodeid, _chaos_arguments(item).get("definition", 1)
    )


def _failure_text(outcome: Outcome) -> str:
    """Return the cause of a failure, the states of the faults, and the directory of the run."""
    lines = [
        f"chaoskit verdict: {outcome.verdict.value}",
        *(f"  - {reason}" for reason in outcome.reasons),
    ]
    lines += [f"  {fault.fault}: {fault.state}" for fault in outcome.faults]
    lines += [f"  {line}" for end in outcome.log_ends for line in str(end).splitlines()]
    return printable("\n".join([*lines, f"  journals and logs: {outcome.directory}"]))


def _with_notes(text: str, error: BaseException) -> str:
    """Return ``text`` with the notes of an error, such as the values that Hypothesis found."""
    notes = getattr(error, "__notes__", [])
    return "\n".join(
        [text, *(f"  {line}" for note in notes for line in printable(note).splitlines())]
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the name of the session to an xdist worker."""
    node.workerinput[_SESSION_INPUT] = node.config.stash[_settings_key].session


class _SessionVerdicts:
    """A collector of the session's verdicts, which determine the exit status.

    It also works in xdist's controller.
    """

    def __init__(self, settings: _Settings, records: SessionRecords | None) -> None:
        self._settings, self._records = settings, records
        self._comparison: RunComparison | None = None
        self._slas: dict[str, dict[str, Any]] = {}  # test -> the SLA of its marker
        self._judged: list[Judged] = []
        self._failures: list[Verdict] = []
        self._refused = False  # a test failed because of bad input

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the verdict of a failed test, and its records."""
        self._collect(report)
        verdicts = [
            worst for name, worst in report.user_properties if name == _VERDICT_PROPERTY + ".worst"
        ]
        if report.failed and verdicts and verdicts[-1] == _BAD_INPUT:
            self._refused = True
        elif report.failed:
            self._failures.append(Verdict(str(verdicts[-1])) if verdicts else Verdict.FAILED)

    def _collect(self, report: Any) -> None:
        """Take the records and the SLA that a report carries."""
        if (sla := getattr(report, "chaoskit_sla", None)) is not None:
            self._slas[sla["name"]] = sla
            if self._records is None:
                from chaoskit.history.session import SessionRecords

                self._records = SessionRecords("", None, "")
        if self._records is not None:
            self._records.take(getattr(report, "chaoskit_records", ()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Set the exit status, and finish the records."""
        if exitstatus == pytest.ExitCode.TESTS_FAILED and self._failures:
            session.exitstatus = Verdict.worst(self._failures).exit_code
        elif exitstatus == pytest.ExitCode.TESTS_FAILED and self._refused:
            session.exitstatus = (
                pytest.ExitCode.INTERRUPTED
            )  # 2, the status of every command for bad input
        if self._records is not None and not hasattr(session.config, "workerinput"):
            is_strict = session.config.getoption("chaos_strict")
            self._judged = self._judge(self._records) if self._slas else []
            self._comparison = self._records.finish(
                is_well=session.exitstatus == pytest.ExitCode.OK
            )
            compared_status = self._status_with_comparison(
                self._records, int(session.exitstatus), is_strict
            )
            session.exitstatus = self._status_with_slas(compared_status, is_strict)
            self._summarise(session.config)

    def _status_with_comparison(self, records: SessionRecords, status: int, is_strict: bool) -> int:
        """Return the exit status with the result of the comparison.

        It is that of ``failed`` if something got worse, and that of ``error`` if records could not
        be written. It is that of ``unknown`` if there is no finding, or neither a run nor earlier
        records. With ``is_strict``, ``unknown`` also stands for an undecided comparison, or no
        earlier records. A worse ``status`` stays.
        """
        compared, unknown = self._comparison, Verdict.UNKNOWN.exit_code
        if status not in (pytest.ExitCode.OK, unknown):
            return status
        if records.has_failed:  # a baseline, a file or a history was not written
            return Verdict.ERROR.exit_code if records.runs else unknown
        if compared is None and records.is_first:
            return unknown if is_strict or not records.runs else status
        if compared is None:
            return status
        if compared.is_regressed:
            return Verdict.FAILED.exit_code
        return unknown if not compared.findings or (is_strict and compared.is_open) else status

    def _summarise(self, config: pytest.Config) -> None:
        """Append the comparison to the file of ``--chaos-summary``.

        In a first session, the number of recorded runs is appended.
        """
        from chaoskit.history.rendering import cell, markdown

        file = config.getoption("chaos_summary")
        if not file or self._records is None:
            return
        if self._comparison is not None:
            text = markdown(self._comparison)
        else:
            lines = [f"### chaoskit: {self._records_sentence(self._records, config)}", ""]
            text = "\n".join([*lines, *(f"- {cell(line)}" for line in self._records.troubles), ""])
        with Path(file).open("a", encoding="utf-8") as summary:
            summary.write(text)

    def _judge(self, records: SessionRecords) -> list[Judged]:
        """Return the results of the SLAs of tests, judged on the records.

        An SLA that cannot be judged is unknown, with the reason.
        """
        from chaoskit.sla.judge import Judged, State, judge
        from chaoskit.sla.promises import parse_marker

        contents, today = records.everything(), datetime.now(UTC).date()
        judged = []
        for name, sla in self._slas.items():
            runs = [run for run in contents.runs if run.title.partition(" #")[0] == name]
            try:
                judged += judge(
                    parse_marker(name, sla["lines"], sla["options"]),
                    runs,
                    contents.plans,
                    today=today,
                )
            except BadInput as error:
                reason = error.remedy if runs else "no run was recorded"
                judged.append(
                    Judged(
                        sla=name, line=", ".join(sla["lines"]), state=State.UNKNOWN, reason=reason
                    )
                )
        return judged

    def _status_with_slas(self, status: int, is_strict: bool) -> int:
        """Return the exit status that the states of SLAs give. A worse ``status`` stays."""
        if not self._judged or status not in (pytest.ExitCode.OK, Verdict.UNKNOWN.exit_code):
            return status
        from chaoskit.sla.judge import exit_code

        return exit_code(self._judged, is_strict=is_strict) or status

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Print the sections about records and the report."""
        if hasattr(config, "workerinput"):
            return
        if self._records is not None:
            self._show_records(self._records, terminalreporter, config)
        if self._settings.report is not None:
            self._show_report(self._settings.report, terminalreporter)

    def _records_sentence(self, records: SessionRecords, config: pytest.Config) -> str:
        """Return the number of recorded runs, and the comparison or its baseline."""
        from chaoskit.history.rendering import comparison_sentence
        from chaoskit.plaintext import plural

        compared, against = self._comparison, config.getoption("chaos_compare")
        recorded = f"{plural(records.runs, 'run')} recorded"
        if compared is not None:
            return f"{recorded}; compared with {against}: {comparison_sentence(compared)}"
        if not records.is_first:
            return recorded
        later = f": later sessions are compared with {against}" if records.is_compared_next else ""
        return f"{recorded}; nothing to compare with yet{later}"

    def _show_records(
        self,
        records: SessionRecords,
        terminalreporter: pytest.TerminalReporter,
        config: pytest.Config,
    ) -> None:
        """Print the records, the comparison and the SLAs."""
        from chaoskit.history.rendering import render_comparison, top_changes
        from chaoskit.report.terminal import Terminal

        compared = self._comparison
        terminalreporter.write_sep("=", "chaoskit history")
        for line in [self._records_sentence(records, config), *records.troubles]:
            terminalreporter.write_line(printable(line))
        if compared is not None and top_changes(compared):
            Terminal().print(render_comparison(compared))
        if self._judged:
            from chaoskit.sla.rendering import render_sla, sla_sentence

            terminalreporter.write_line(f"SLAs: {sla_sentence(self._judged)}")
            Terminal().print(render_sla(self._judged))

    def _show_report(self, report: Path, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the HTML report, and print its path and the recovery probability."""
        from chaoskit.plaintext import plural
        from chaoskit.report.html import write_html
        from chaoskit.report.statistics import estimate_recovery
        from chaoskit.report.store import read_outcomes
        from chaoskit.report.summary import recovery_sentence

        try:
            outcomes = read_outcomes(report)
        except BadInput:
            return  # no chaos test ran
        session_outcomes = [
            outcome for outcome in outcomes if outcome.session == self._settings.session
        ]
        if not session_outcomes:
            return
        page = report / "report.html"
        write_html(outcomes, page)
        others = len(outcomes) - len(session_outcomes)
        more = f", with {plural(others, 'run')} of other sessions" if others else ""
        terminalreporter.write_sep(
            "=", f"chaoskit: {plural(len(session_outcomes), 'run')}, {page}{more}"
        )
        total = estimate_recovery(session_outcomes).total
        if total.runs:
            terminalreporter.write_line(recovery_sentence(total))
