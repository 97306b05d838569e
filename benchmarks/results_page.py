"""Print benchmarks/results.md: ``python -m benchmarks.results_page > benchmarks/results.md``.

The page has a section for each file of ``benchmarks/results``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from benchmarks.harness.bars import Report, render_markdown
from benchmarks.harness.results import RESULTS
from benchmarks.verdicts import decisions, versions

_HEAD = """# Results of the benchmarks

A section holds what is in the file of its name in `benchmarks/results`, as the last run of that benchmark wrote it.
Each benchmark also writes its samples, to `benchmarks/results/samples`, which git ignores.
This page is generated: `python -m benchmarks.results_page > benchmarks/results.md`.
"""


def render_page(results: Path = RESULTS) -> str:
    """Return the page, with a section for each file of ``results``."""
    files = sorted(results.glob("*.json"))
    links = ", ".join(f"[{file.stem}](#{file.stem})" for file in files)
    sections = [f"## {file.stem}\n\n{render_section(file)}" for file in files]
    return "\n".join([_HEAD, f"{links}.\n", *sections])


def render_section(file: Path) -> str:
    """Return the section of ``file``, without its heading."""
    if file.stem == "decisions":
        return decisions.render_markdown(msgspec.json.decode(file.read_bytes()))
    if file.stem == "versions":
        return versions.render_markdown(msgspec.json.decode(file.read_bytes()))
    return render_markdown(msgspec.json.decode(file.read_bytes(), type=Report))


if __name__ == "__main__":
    sys.stdout.write(render_page())
