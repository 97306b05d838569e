"""Print docs/faults.md: ``python docs/generate/faults_page.py > docs/faults.md``.

It is made from the catalogue and ``faults.md.j2``, and is the same on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chaoskit.faults import CATALOGUE
from chaoskit.faults.base import FAMILIES
from chaoskit.faults.describe import (
    common_parameters,
    entry,
    moments_in_words,
    of_family,
    own_parameters,
    signature,
    sorted_roles,
)
from chaoskit.faults.incidents import BYTE_ROBUST, INCIDENTS, LLAMA_3, Study


def render_page() -> str:
    """Return the whole page."""
    # autoescape is off: the page is Markdown, and nothing in it comes from outside
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(cell=_cell, signature=signature)
    families = {
        title: [
            entry(kind)
            | {"roles": sorted_roles(kind), "when": moments_in_words(kind), "rows": kind.counted}
            | {"own": own_parameters(kind)}
            for kind in of_family(family)
        ]
        for family, title in FAMILIES.items()
    }
    studies = [(study, _rows(study)) for study in (LLAMA_3, BYTE_ROBUST)]
    template = environment.get_template("faults.md.j2")
    return template.render(families=families, studies=studies, common=common_parameters())


def _rows(study: Study) -> list[dict[str, Any]]:
    return [
        {
            "incident": incident,
            "faults": [kind.__name__ for kind in CATALOGUE if incident in kind.counted],
        }
        for incident in INCIDENTS
        if incident.study == study
    ]


def _cell(text: str) -> str:
    """Return ``text`` escaped for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(render_page())
