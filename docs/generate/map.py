"""Write the map of the packages in ``docs/architecture.md``:
``python docs/generate/map.py --write``.

The order is that of the import contracts in ``pyproject.toml``. Each line is the first sentence of
the docstring of a package or module.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- written by docs/generate/map.py -->", "<!-- end of the map -->"
#: Packages whose rooms are shown, too.
_OPEN = ("coordinator", "runtime", "checkpoint", "substrate", "experiment")
_NAME_WIDTH = 24


def package_map() -> str:
    """Return the map as an indented block."""
    return "\n".join(f"    {line}".rstrip() for line in _lines())


def _lines() -> Iterator[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    for layer in layers:
        for name in re.findall(r"chaoskit\.(\w+)", layer):
            yield _line(_place(name), "")
            if name in _OPEN:
                rooms = sorted(
                    path.parent for path in (ROOT / "chaoskit" / name).glob("*/__init__.py")
                )
                yield from (_line(room, "  ") for room in rooms)


def _place(name: str) -> Path:
    """Return the folder or file of a package or module of chaoskit."""
    places = [ROOT / "chaoskit" / name, ROOT / name, ROOT / "chaoskit" / f"{name}.py"]
    return next(place for place in places if place.exists())


def _line(place: Path, indent: str) -> str:
    file = place / "__init__.py" if place.is_dir() else place
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    name = f"{indent}{place.name}/" if place.is_dir() else f"{indent}{place.name}"
    return f"{name:{_NAME_WIDTH}}{_first_sentence(docstring)}"


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.split("\n\n", maxsplit=1)[0].split())
    return re.split(r"(?<=[.!?]) ", re.sub(r":\w+:`([^`]*)`|``", r"\1", paragraph))[0]


def main() -> None:
    """Print the map, or write it into its page."""
    if "--write" not in sys.argv[1:]:
        print(package_map())
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{package_map()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
