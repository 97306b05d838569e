"""Replay of the changes that turn features off: ``python tests/tools/replay.py --only "no step is lost"``.

``tests/tools/promises_off.toml`` holds one small change of the product for each promise of the
documentation: with it the feature does nothing. Each is put in place in a temporary copy of this
tree, and the cases that are marked with the promise are run there. At least one that passes without
the change must fail with it. If none does, the cases hold for a feature that is not there, and the
command ends with status 1. Your checkout is only read; changes that are not committed are in the
copy, too.

An entry names a function and the body that it has instead, or a constant and its value: see
    ``features_off.py``.

The failure that is printed for each promise should be the one that its test was written for: a
change that breaks the imports makes everything fail and shows nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from features_off import ENTRIES, Off, entries
from mutants import ROOT, in_place
from promises import marked

_TEST_S = 300
_LIMIT_S = 1800.0
_MARK = "CHAOSKIT_REPLAY"  # in the environment of every process that a replay starts


# -- the copy --------------------------------------------------------------------------------------


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of this tree, with its packages where an installation has them; it goes with the context."""
    with tempfile.TemporaryDirectory(prefix="replay-") as directory:
        Path(directory).chmod(0o755)  # some tests have processes of another user
        root = Path(directory) / "tree"
        command = [
            "git",
            "-C",
            str(ROOT),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        places = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
            "package-dir"
        ]
        for package, folder in places.items():
            if (
                package.replace(".", "/") != folder
            ):  # an editable installation would find the checkout's
                (root / package.replace(".", "/")).symlink_to(root / folder)
        _check_imports(root, places)
        yield root


def _check_imports(root: Path, packages: Sequence[str]) -> None:
    code = "import importlib, sys; [print(importlib.import_module(name).__file__) for name in sys.argv[1:]]"
    command = [sys.executable, "-c", code, *packages]
    ran = subprocess.run(
        command, cwd="/", env=_environment(root), capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(f"chaoskit cannot be imported by {sys.executable}:\n{ran.stderr}")
    if strangers := [
        path for path in ran.stdout.splitlines() if not Path(path).is_relative_to(root)
    ]:
        raise SystemExit(f"The copy {root} is not what Python imports, but {strangers}")


def _environment(root: Path) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # the copy has its own bytecode, which most entries share
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
        _MARK: str(root),
    }


# -- trying ----------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What the cases of a promise did with its feature off; only those that pass with the feature count.

    Attributes:
        failed: error of each case that noticed.
        passed: cases that did not notice.
        left_out: cases that were skipped, or failed with the feature, too.
    """

    failed: dict[str, str]
    passed: int
    left_out: int

    @property
    def is_unnoticed(self) -> bool:
        """Return whether there was a case that could have failed, and none did."""
        return bool(self.passed) and not self.failed


def tried(off: Off, root: Path) -> dict[str, Seen]:
    """The cases of each promise with its feature off, beside the same cases with it."""
    tests = sorted({promise.test for promise in marked() if promise.text in off.promises})
    options = [f"--promise={text}" for text in off.promises]
    before = _outcomes([*options, *tests], root) or {}
    sound = [name for name, case in before.items() if case["outcome"] == "passed"]
    after: dict[str, dict[str, Any]] | None = {}
    if sound:
        with in_place(off.mutant(root), root):
            after = _outcomes([*options, *sound], root)
    return {text: judged(text, before, after) for text in off.promises}


def judged(
    text: str, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]] | None
) -> Seen:
    """What the cases of a promise did.

    Args:
        before: outcome of each case by its name with the feature, as ``--durations-file`` keeps it.
        after: without it; None if the tests did not end in time, which is noticed by all of them.
    """
    cases = [name for name, case in before.items() if text in case.get("promises", [])]
    sound = [name for name in cases if before[name]["outcome"] == "passed"]
    if after is None:
        failed = dict.fromkeys(sound, f"not within {_LIMIT_S:g} s: the end of the tests")
    else:
        failed = {
            name: after[name]["error"]
            for name in sound
            if after.get(name, {}).get("outcome") == "failed"
        }
    passed = [name for name in sound if after and after.get(name, {}).get("outcome") == "passed"]
    return Seen(failed, len(passed), len(cases) - len(failed) - len(passed))


def _outcomes(arguments: list[str], root: Path) -> dict[str, dict[str, Any]] | None:
    """Outcome of each test by its name, none where they cannot be collected; None if they did not end in time."""
    ended = root.parent / "durations.json"
    ended.unlink(missing_ok=True)
    limits = ["--timeout", str(_TEST_S), "--timeout-method", "signal"]
    _pytest(
        ["-q", "-p", "no:cacheprovider", *limits, "--durations-file", str(ended), *arguments], root
    )
    return json.loads(ended.read_text()) if ended.exists() else None


def _pytest(arguments: list[str], root: Path) -> None:
    command = [sys.executable, "-m", "pytest", *arguments]
    with (root.parent / "output").open("w") as output, suppress(subprocess.TimeoutExpired):
        try:
            subprocess.run(
                command,
                cwd=root,
                env=_environment(root),
                stdout=output,
                stderr=output,
                timeout=_LIMIT_S,
                check=False,
            )
        finally:
            _end_rest(root)


def _end_rest(root: Path) -> None:
    """End processes that a test left behind, as it may with the feature off that ends them."""
    mark = f"{_MARK}={root}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def report(text: str, seen: Seen) -> str:
    """What a promise's cases did, in a line."""
    if seen.failed:
        test, error = next(iter(seen.failed.items()))
        return f"  red: {text!r}\n       {test}: {error}"
    if seen.passed:
        return f"  PASSES WITH ITS FEATURE OFF: {text!r} ({seen.passed} cases)"
    return f"  NOT RUN HERE: {text!r} ({seen.left_out} cases were skipped, fail with the feature, too, or did not run)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Copy the tree, try each entry, say what stayed green."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="entries whose words, file or promises contain it",
    )
    parser.add_argument("--list", action="store_true", help="show the entries and try none")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the cases of each promise there"
    )
    options = parser.parse_args(arguments)
    wanted = options.only.lower()
    chosen = [
        off for off in entries() if wanted in "\n".join([off.what, off.file, *off.promises]).lower()
    ]
    if not chosen:
        parser.error(f"no entry of {ENTRIES} contains {options.only!r}")
    results, every, out_of_date = [], list[Seen](), 0
    if options.list:
        print("\n".join(f"{off.file}: {off.what}" for off in chosen))
        return 0
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # the copy goes, and its processes
    with copied() as root:
        for number, off in enumerate(chosen, 1):
            try:
                line = off.mutant(root).line
            except ValueError as error:
                print(f"{number}/{len(chosen)} OUT OF DATE: {error}", flush=True)
                out_of_date += 1
                continue
            print(f"{number}/{len(chosen)} {off.file}:{line} {off.what} ...", flush=True)
            began_s = time.monotonic()
            seen = tried(off, root)
            took_s = round(time.monotonic() - began_s, 1)
            print(
                "\n".join(report(text, seen[text]) for text in off.promises),
                f"\n  {took_s} s",
                flush=True,
            )
            told = {text: one._asdict() for text, one in seen.items()}
            results.append(
                {"what": off.what, "file": off.file, "seconds": took_s, "promises": told}
            )
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
            every += seen.values()
    unnoticed = sum(seen.is_unnoticed for seen in every)
    not_run = sum(not seen.failed and not seen.passed for seen in every)
    turned_off = len(chosen) - out_of_date
    print(
        f"{turned_off} features were turned off; {unnoticed} promises did not notice, {not_run} were not run here"
    )
    return int(unnoticed > 0 or out_of_date > 0)


if __name__ == "__main__":
    sys.exit(main())
