"""The pytest face of chaoskit: fixture ``chaos``, marker, options, and exit codes that tell a verdict.

    def test_losing_a_rank_costs_nothing(chaos):
        outcome = chaos.run("gpt", nodes=4, steps=60, faults=[Kill(rank=2, at_step=20)])
        assert outcome.recovery.seconds < 0.5

Imports of torch and of the harness wait until a test asks for ``chaos``: installing chaoskit slows no other suite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chaoskit.errors import BadInput, HarnessError
from chaoskit.vocabulary import Verdict

if TYPE_CHECKING:
    from chaoskit.experiment.harness import Harness
    from chaoskit.experiment.outcome import Outcome
    from chaoskit.substrate.base import Substrate
    from faults.base import Fault

SUBSTRATES = ("local",)
_VERDICT_PROPERTY = "chaoskit.verdict"


class VerdictError(AssertionError):
    """The outcome of a run is not ``passed``. Carries the outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(f"{outcome.verdict.value}: {'; '.join(outcome.reasons)} (journals: {outcome.directory})")


# -- options ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaoskit", "fault injection for distributed training")
    group.addoption(
        "--chaos-substrate", choices=SUBSTRATES, default=None, help="where nodes come from (default: local)"
    )
    group.addoption("--chaos-seed", type=int, default=None, help="seed of every run (default: 0)")
    group.addoption("--chaos-repeats", type=int, default=None, help="run each chaos test this many times (default: 1)")
    group.addoption(
        "--chaos-report", metavar="DIR", default=None, help="write outcomes, journals and an HTML page to DIR"
    )
    parser.addini("chaos_substrate", "where nodes come from", default="local")
    parser.addini("chaos_seed", "seed of every run", default="0")
    parser.addini("chaos_repeats", "how often each chaos test is run", default="1")
    parser.addini("chaos_report", "directory for outcomes, journals and the HTML page", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "chaos(**defaults): defaults for chaos.run in this test, such as nodes=2 or seed=7; repeats=N runs it N times",
    )
    config.addinivalue_line("markers", "gpu: needs a CUDA device, skipped visibly without one")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    settings = _settings(config)
    config.stash[_settings_key] = settings
    config.pluginmanager.register(_Tally(settings), "chaoskit-tally")


@dataclass(frozen=True)
class _Settings:
    substrate: str
    seed: int
    repeats: int
    report: Path | None


_settings_key = pytest.StashKey[_Settings]()


def _settings(config: pytest.Config) -> _Settings:
    def value(name: str) -> Any:
        given = config.getoption(f"chaos_{name}")
        return config.getini(f"chaos_{name}") if given is None else given

    try:
        seed, repeats = int(value("seed")), int(value("repeats"))
    except ValueError as error:
        raise pytest.UsageError(f"chaos_seed and chaos_repeats must be whole numbers: {error}") from None
    if repeats < 1:
        raise pytest.UsageError(f"chaos_repeats={repeats}: use 1 or more")
    if value("substrate") not in SUBSTRATES:
        raise pytest.UsageError(f"chaos_substrate={value('substrate')!r}: use one of {', '.join(SUBSTRATES)}")
    report = value("report")
    if report:
        from chaoskit.config import require_writable

        try:
            require_writable("chaos_report", Path(report))
        except BadInput as error:
            raise pytest.UsageError(str(error)) from None
    return _Settings(value("substrate"), seed, repeats, Path(report).resolve() if report else None)


# -- collection ---------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every chaos test its repeats."""
    if "chaos" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("chaos")
    repeats = metafunc.config.stash[_settings_key].repeats
    if marker is not None:
        repeats = marker.kwargs.get("repeats", repeats)
    if repeats > 1:
        metafunc.fixturenames.append("_chaos_repeat")
        metafunc.parametrize("_chaos_repeat", range(repeats), ids=[f"repeat{number}" for number in range(repeats)])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device; this machine has none")


# -- fixtures -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def chaos_substrate(pytestconfig: pytest.Config) -> Iterator[Substrate]:
    """The substrate of the session, kept warm over all tests."""
    from chaoskit.substrate.local import LocalSubstrate

    substrate = LocalSubstrate()
    yield substrate
    substrate.close()


@pytest.fixture(scope="session")
def chaos_harness(
    pytestconfig: pytest.Config, chaos_substrate: Substrate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Harness]:
    """The harness of the session."""
    from chaoskit.experiment.harness import Harness

    report = pytestconfig.stash[_settings_key].report
    worker = getattr(pytestconfig, "workerinput", {}).get("workerid", "")
    directory = report / "runs" / worker if report else tmp_path_factory.mktemp("chaos")
    harness = Harness(chaos_substrate, directory)
    yield harness
    harness.close()


@pytest.fixture
def chaos(request: pytest.FixtureRequest, chaos_harness: Harness) -> Chaos:
    """Runs training jobs and breaks them. See :meth:`Chaos.run`."""
    marker = request.node.get_closest_marker("chaos")
    defaults = {"seed": request.config.stash[_settings_key].seed, **(marker.kwargs if marker else {})}
    defaults.pop("repeats", None)
    return Chaos(chaos_harness, request.node, defaults)


@dataclass
class Chaos:
    """What the fixture ``chaos`` gives to a test."""

    harness: Harness
    item: pytest.Item
    defaults: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, job: str, *, faults: Sequence[Fault] = (), check: bool = True, **plan: Any) -> Outcome:
        """Run ``job``, break it, and judge it against the unbroken run.

        Args:
            job: a reference job (``gpt``), a file, or ``file.py:function``. A relative file is looked up beside the
                test, then in the working directory.
            faults: what to break.
            check: fail the test unless the verdict is ``passed``; ``False`` only returns the outcome, which then counts
                neither for nor against the recovery probability of the report.
            plan: ``steps``, ``nodes``, ``spares``, ``seed``, ``options``, ``deadline_s``, ``twin`` and every other
                field of :class:`chaoskit.config.RunConfig`.

        Raises:
            BadInput: before anything is started. VerdictError: the verdict is not ``passed``.
            HarnessError: chaoskit itself failed.
        """
        from chaoskit.report.junit import junit_properties
        from chaoskit.report.store import write_outcome

        number = f" #{len(self.outcomes) + 1}" if self.outcomes else ""
        settings = {"name": f"{self.item.name}{number}", **self.defaults, **plan}
        outcome = self.harness.run(self._locate(job), faults=faults, **settings)
        outcome.claimed = check
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
    if call.excinfo is None or not report.failed:
        return
    error = call.excinfo.value
    if isinstance(error, VerdictError):
        verdict = error.outcome.verdict
        report.longrepr = _brief(error.outcome)
    elif isinstance(error, HarnessError):
        verdict = Verdict.ERROR
    else:
        verdict = Verdict.FAILED
    report.user_properties.append((_VERDICT_PROPERTY + ".worst", verdict.value))


def _brief(outcome: Outcome) -> str:
    """What a person needs first: why, and where to look."""
    lines = [f"chaoskit verdict: {outcome.verdict.value}", *(f"  - {reason}" for reason in outcome.reasons)]
    lines += [f"  {fault.fault}: {fault.state}" for fault in outcome.faults]
    return "\n".join([*lines, f"  journals and logs: {outcome.directory}"])


class _Tally:
    """Collects verdicts over the session, in xdist's controller too, and turns them into the exit status."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._failures: list[Verdict] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = [value for name, value in report.user_properties if name == _VERDICT_PROPERTY + ".worst"]
        if report.failed:
            self._failures.append(Verdict(str(found[-1])) if found else Verdict.FAILED)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.TESTS_FAILED and self._failures:
            session.exitstatus = Verdict.worst(self._failures).exit_code

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        report = self._settings.report
        if report is None or hasattr(config, "workerinput"):
            return
        from chaoskit.report.html import write_html
        from chaoskit.report.statistics import estimate_recovery
        from chaoskit.report.store import read_outcomes
        from chaoskit.report.summary import recovery_sentence

        try:
            outcomes = read_outcomes(report)
        except BadInput:
            return  # no chaos test ran
        write_html(outcomes, report / "report.html")
        terminalreporter.write_sep("=", f"chaoskit: {len(outcomes)} runs, {report / 'report.html'}")
        total = estimate_recovery(outcomes).total
        if total.runs:
            terminalreporter.write_line(recovery_sentence(total))
