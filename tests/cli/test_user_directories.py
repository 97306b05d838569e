"""Tests of homes and caches that cannot be written: chaoskit works without them, or names the
variable to set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaoskit.errors import BadInput
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.reference.cache import directory_of, keep, kept, locked
from chaoskit.experiment.twin.twin import Twin, TwinCache
from chaoskit.health.quarantine import Quarantine, state_directory
from chaoskit.pytest_plugin import Chaos
from chaoskit.vocabulary import Verdict

PLAIN = f"{Path(__file__).parents[1] / 'jobs' / 'failing' / 'troubled.py'}:plain"


@pytest.fixture(params=["a file", "a device", "a directory of the kernel"])
def unwritable(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a home directory in which no file can be created, not even by root."""
    (tmp_path / "file").write_text("")
    places = {
        "a file": tmp_path / "file",
        "a device": Path(os.devnull),
        "a directory of the kernel": Path("/proc/1"),
    }
    return places[request.param] / "home"


def test_a_result_that_cannot_be_written_is_kept_for_the_session(
    unwritable: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(unwritable))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    path = directory_of("twins") / "a.json"
    with locked(path), pytest.raises(OSError, match=r"a\.json"):
        kept(path)
    keep(path, b"first")
    keep(path, b"second")
    assert kept(path) == b"second"
    (line,) = capfd.readouterr().err.splitlines()
    assert "set XDG_CACHE_HOME to a directory that can be written" in line
    assert str(unwritable) in line


def test_unbroken_runs_are_known_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    twins, experiment = TwinCache(tmp_path / "file" / "twins"), plan_experiment(PLAIN, steps=20)
    twin = Twin(losses=[1.0, 0.5], weights_digest="a", samples_digest="b")
    with twins.lock(experiment):
        assert twins.get(experiment) is None
        twins.put(experiment, twin)
    assert twins.get(experiment) == twin


@pytest.mark.parametrize("variable", ["HOME", "XDG_STATE_HOME"])
def test_a_list_of_nodes_is_read_as_empty_and_names_the_variable_when_it_is_written(
    unwritable: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv(variable, str(unwritable))
    quarantine = Quarantine(state_directory())
    assert quarantine.entries() == []
    with pytest.raises(BadInput, match="or set XDG_STATE_HOME to a directory that can be written"):
        quarantine.add("node0", "a reason")


HOMELESS = """
import os
from chaoskit.errors import BadInput
from chaoskit.experiment.reference.cache import directory_of, keep, kept
from chaoskit.health.quarantine import state_directory
for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
    os.environ.pop(name, None)
os.getuid = lambda: 54321  # a uid without an entry in the user database, as in a container
keep(directory_of("twins") / "a.json", b"a")
print(kept(directory_of("twins") / "a.json"))
try:
    state_directory()
except BadInput as error:
    print(error)
"""


def test_a_user_without_a_home(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HOMELESS], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [
        "b'a'",
        "XDG_STATE_HOME='': set it to a directory that can be written: user 54321 has no home directory",
    ]
    assert "set XDG_CACHE_HOME" in ran.stderr
    assert not [*tmp_path.iterdir()]


def test_a_run_without_a_cache(chaos: Chaos, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unbroken twin and the reference of plain PyTorch are trained, compared, and not
    written.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    outcome = chaos.run(PLAIN, nodes=2, steps=20)
    assert outcome.verdict is Verdict.PASSED, outcome.reasons
