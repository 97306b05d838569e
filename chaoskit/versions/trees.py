"""Versions of a repository as directories of their own, which leave no trace in the user's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from chaoskit.errors import BadInput

#: The files as they are now, those that are not committed among them.
WORKING_TREE = "."
#: Where the branch of HEAD left the one into which it shall be merged.
MERGE_BASE = "merge-base"
#: The commit of the last night in which nothing was wrong. It is found in a history, and no version of git's.
LAST_GOOD = "last-good"
#: What a branch is merged into where neither CI nor the repository says so.
_MAINLINES = ("origin/HEAD", "origin/main", "origin/master", "main", "master")
_AUTHOR = ("-c", "user.name=chaoskit", "-c", "user.email=chaoskit@localhost")
_PATIENCE_S = 120.0


class Repository:
    """The user's repository, which is only read.

    Args:
        directory: in it. scratch: for objects and an index of our own.

    Attributes:
        root: its uppermost directory.

    Raises:
        BadInput: if the directory is in none.
    """

    def __init__(self, directory: Path, scratch: Path) -> None:
        self._objects, self._index = scratch / "objects", scratch / "index"
        try:
            self.root = Path(_git(directory, "rev-parse", "--show-toplevel"))
        except _GitError as error:
            raise BadInput(
                "directory", str(directory), f"run it in a git repository: {error}"
            ) from None

    def commit_of(self, version: str) -> str:
        """The commit of a version: a revision, :data:`MERGE_BASE`, or :data:`WORKING_TREE`.

        Raises:
            BadInput: if there is none.
        """
        if version == WORKING_TREE:
            return self._working_tree()
        if version == MERGE_BASE:
            return self._merge_base()
        try:
            return _git(
                self.root,
                "rev-parse",
                "--verify",
                "--quiet",
                "--end-of-options",
                f"{version}^{{commit}}",
            )
        except _GitError:
            remedy = (
                "name a commit, a branch, merge-base, '.' for the files as they are, or env:PATH"
            )
            raise BadInput(
                "version", version, f"{remedy}; a shallow clone has no other commit"
            ) from None

    @property
    def head(self) -> str:
        """The commit that is checked out."""
        return _git(self.root, "rev-parse", "HEAD")

    def _working_tree(self) -> str:
        """A commit of all files that git does not ignore, on no branch; HEAD where nothing is changed."""
        own = {
            "GIT_INDEX_FILE": str(self._index),
            "GIT_OBJECT_DIRECTORY": str(self._objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(self._git_path("objects")),
        }
        try:
            self._objects.mkdir(exist_ok=True)
            # with its time, by which git knows which files it has to look into
            shutil.copy2(self._git_path("index"), self._index)
            _git(self.root, "add", "--all", **own)
            tree = _git(self.root, "write-tree", **own)
            if tree == _git(self.root, "rev-parse", "HEAD^{tree}"):
                return self.head
            return _git(
                self.root,
                *_AUTHOR,
                "commit-tree",
                tree,
                "-p",
                "HEAD",
                "-m",
                "the working tree",
                **own,
            )
        except (_GitError, OSError) as error:
            raise BadInput("version", WORKING_TREE, f"commit your changes: {error}") from None

    def _merge_base(self) -> str:
        if given := os.environ.get("CI_MERGE_REQUEST_DIFF_BASE_SHA"):  # GitLab's
            return self.commit_of(given)
        target = os.environ.get("GITHUB_BASE_REF")
        for mainline in (f"origin/{target}",) if target else _MAINLINES:
            try:
                return _git(self.root, "merge-base", "HEAD", mainline)
            except _GitError:
                continue
        remedy = f"fetch {target or 'the main branch'} with its history (actions/checkout: fetch-depth: 0)"
        raise BadInput("version", MERGE_BASE, f"{remedy}, or name a commit")

    def check_out(self, commit: str, directory: Path) -> None:
        """Make a directory with the files of a commit, a repository of its own that reads the objects of this one.

        Raises:
            BadInput: if it cannot be checked out.
        """
        try:
            _git(self.root, "init", "--quiet", str(directory))
            there = directory / ".git"
            (there / "objects/info/alternates").write_text(
                f"{self._git_path('objects')}\n{self._objects}\n"
            )
            if (shallow := self._git_path("shallow")).is_file():
                (there / "shallow").write_bytes(shallow.read_bytes())
            _git(directory, "checkout", "--quiet", "--detach", commit)
        except (_GitError, OSError) as error:
            raise BadInput("version", commit, f"it cannot be checked out: {error}") from None

    def _git_path(self, name: str) -> Path:
        return (self.root / _git(self.root, "rev-parse", "--git-path", name)).resolve()


class _GitError(Exception):
    """Git has refused."""


def _git(directory: Path, *arguments: str, **environment: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    # a hook's variables name another repository; settings, such as which directories are safe, stay
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or "CONFIG" in name
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
            env=own | environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _GitError(str(error)) from None
    if done.returncode:
        raise _GitError(done.stderr.strip() or f"git {arguments[0]} ended with {done.returncode}")
    return done.stdout.strip()
