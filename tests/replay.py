"""Replay of the changes that turn features off: ``python tests/replay.py --only "no step is lost"``.

``tests/promises_off.toml`` holds one small change of the product for each promise of the documentation: with it the
feature does nothing. Each is put in place in a temporary copy of this tree, and the cases that are marked with the
promise are run there. At least one of them must fail. If all pass, they hold for a feature that is not there, and the
command ends with status 1. Your checkout is only read; changes that are not committed are in the copy, too.

An entry of the file:

    [[off]]
    what = "the coordinator forgets a request when it ends"   # what does nothing now
    promises = ["A request is in the coordinator's record"]   # sentences, as the tests quote them
    file = "chaoskit/control/record.py"
    old = '''            self._write(request)'''                    # stands exactly once in the file
    new = '''            pass'''

The failure that is printed for each promise should be the one that its test was written for: a change that breaks the
imports makes everything fail and shows nothing.
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

from mutants import ROOT, Mutant, in_place
from support.promises import marked

ENTRIES = ROOT / "tests" / "promises_off.toml"
_TEST_S = 300
_LIMIT_S = 1800.0
_MARK = "CHAOSKIT_REPLAY"  # in the environment of every process that a replay starts


class Off(NamedTuple):
    """A change that turns a feature off.

    Attributes:
        what: what does nothing then, in words.
        promises: sentences of the documentation that it breaks.
        file: relative to the root of the tree.
        old: text that stands exactly once in the file.
        new: what it is replaced with.
    """

    what: str
    promises: list[str]
    file: str
    old: str
    new: str

    def mutant(self, root: Path = ROOT) -> Mutant:
        """The place of the change in a tree.

        Raises:
            ValueError: the text does not stand exactly once in its file.
        """
        source = (root / self.file).read_bytes()
        old = self.old.encode()
        if (count := source.count(old)) != 1:
            raise ValueError(f"{self.file}: the text of {self.what!r} stands there {count} times instead of once")
        begin = source.index(old)
        return Mutant(self.file, source.count(b"\n", 0, begin) + 1, self.what, begin, begin + len(old), self.new)


def entries() -> list[Off]:
    """Every entry of the file."""
    return [Off(**entry) for entry in tomllib.loads(ENTRIES.read_text())["off"]]


def without_entry() -> list[str]:
    """Promises that no entry breaks yet, as the file lists them."""
    found: list[str] = tomllib.loads(ENTRIES.read_text())["without"]
    return found


# -- the copy -----------------------------------------------------------------------------------------------------


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of this tree, with its packages where an installation has them; it goes with the context."""
    with tempfile.TemporaryDirectory(prefix="replay-") as directory:
        Path(directory).chmod(0o755)  # some tests have processes of another user
        root = Path(directory) / "tree"
        command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        places = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
        for package, folder in places.items():
            if package.replace(".", "/") != folder:  # an editable installation would find the checkout's
                (root / package.replace(".", "/")).symlink_to(root / folder)
        _check_imports(root, places)
        yield root


def _check_imports(root: Path, packages: Sequence[str]) -> None:
    code = "import importlib, sys; [print(importlib.import_module(name).__file__) for name in sys.argv[1:]]"
    command = [sys.executable, "-c", code, *packages]
    ran = subprocess.run(command, cwd="/", env=_environment(root), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"chaoskit cannot be imported by {sys.executable}:\n{ran.stderr}")
    if strangers := [path for path in ran.stdout.splitlines() if not Path(path).is_relative_to(root)]:
        raise SystemExit(f"The copy {root} is not what Python imports, but {strangers}")


def _environment(root: Path) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # the copy has its own bytecode, which most entries share
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
        _MARK: str(root),
    }


# -- trying -------------------------------------------------------------------------------------------------------


def tried(off: Off, root: Path) -> dict[str, dict[str, Any]]:
    """The cases of each promise with its feature off: how many passed and were skipped, and why the others failed."""
    tests = sorted({promise.test for promise in marked() if promise.text in off.promises})
    ended = root.parent / "durations.json"
    ended.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "--timeout", str(_TEST_S), "--timeout-method", "signal"]
    options += [f"--promise={text}" for text in off.promises] + ["--durations-file", str(ended)]
    if len(off.promises) == 1:
        options.append("-x")
    with in_place(off.mutant(root), root):
        output = _pytest([*options, *tests], root)
    outcomes = json.loads(ended.read_text()) if ended.exists() else {}
    if not outcomes:
        raise SystemExit(f"{off.what}: no test came to an end, is the change sound?\n{output}")
    return {text: _seen(text, outcomes) for text in off.promises}


def _seen(text: str, outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    cases = {name: case for name, case in outcomes.items() if text in case.get("promises", [])}
    count = {outcome: sum(case["outcome"] == outcome for case in cases.values()) for outcome in ("passed", "skipped")}
    failed = {name: case["error"] for name, case in cases.items() if case["outcome"] == "failed"}
    return {"failed": failed, **count}


def _pytest(arguments: list[str], root: Path) -> str:
    command = [sys.executable, "-m", "pytest", *arguments]
    with (root.parent / "output").open("w+") as output:
        try:
            subprocess.run(
                command,
                cwd=root,
                env=_environment(root),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            output.write(f"\nended after {_LIMIT_S:.0f} s\n")
        finally:
            _end_rest(root)
        output.seek(0)
        return output.read()


def _end_rest(root: Path) -> None:
    """End processes that a test left behind, as it may with the feature off that ends them."""
    mark = f"{_MARK}={root}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def report(text: str, seen: dict[str, Any]) -> str:
    """What a promise's cases did, in a line."""
    for test, error in seen["failed"].items():
        return f"  red: {text!r}\n       {test}: {error}"
    if seen["passed"]:
        return f"  PASSES WITH ITS FEATURE OFF: {text!r} ({seen['passed']} cases)"
    return f"  NOT RUN HERE: {text!r} ({seen['skipped']} cases skipped)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Copy the tree, try each entry, say what stayed green."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="entries whose words, file or promises contain it")
    parser.add_argument("--list", action="store_true", help="show the entries and try none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cases of each promise there")
    options = parser.parse_args(arguments)
    wanted = options.only.lower()
    chosen = [off for off in entries() if wanted in "\n".join([off.what, off.file, *off.promises]).lower()]
    if not chosen:
        parser.error(f"no entry of {ENTRIES} contains {options.only!r}")
    results = []
    if options.list:
        print("\n".join(f"{off.file}: {off.what}" for off in chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the copy goes, and its processes
    with copied() as root:
        for number, off in enumerate(chosen, 1):
            print(f"{number}/{len(chosen)} {off.file}:{off.mutant(root).line} {off.what} ...", flush=True)
            began_s = time.monotonic()
            seen = tried(off, root)
            took_s = round(time.monotonic() - began_s, 1)
            print("\n".join(report(text, seen[text]) for text in off.promises), f"\n  {took_s} s", flush=True)
            results.append({"what": off.what, "file": off.file, "seconds": took_s, "promises": seen})
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    green = sum(not seen["failed"] for result in results for seen in result["promises"].values())
    print(f"{len(chosen)} features were turned off, {green} promises did not notice")
    return int(green > 0)


if __name__ == "__main__":
    sys.exit(main())
