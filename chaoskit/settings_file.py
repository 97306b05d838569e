"""The loader of settings files: documents of YAML, JSON and TOML as plain values.

All files that a user has written are read here. So a duplicate key is refused everywhere: its later
value would silently replace the earlier one.

-> ``typed.py``: conversion to settings. ``rules/rules.py``, ``elastic/settings.py`` and
``sla/promises.py``: the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from chaoskit.errors import BadInput

_SIZE_MAX_BYTES = 16_000_000
_DEPTH_MAX = 100


def read_documents(field: str, path: Path) -> list[Any]:
    """Return the documents of a file: TOML and JSON by its suffix, else YAML, which includes JSON.

    A YAML file without content has none.

    Raises:
        BadInput: if the file cannot be read or parsed, is too large, or has a key twice.
    """
    data = _read(field, path)
    try:
        if path.suffix == ".toml":
            import tomllib

            return [tomllib.loads(data.decode())]
        return [parse_json(data)] if path.suffix == ".json" else parse_yaml(data)
    except (ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise BadInput(field, str(path), f"mend it: {problem}") from None


def _read(field: str, path: Path) -> bytes:
    """Return the content of a file. Raise BadInput if it cannot be read, or is too large."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no path has a NUL
        raise BadInput(
            field, str(path), f"name a file that can be read ({getattr(error, 'strerror', error)})"
        ) from None
    if len(data) > _SIZE_MAX_BYTES:
        raise BadInput(
            field,
            str(path),
            f"name a file of settings: this one has over {_SIZE_MAX_BYTES / 1e6:.0f} MB",
        )
    return data


def read_document(field: str, path: Path) -> Any:
    """Return the document of a file that has exactly one.

    Raises:
        BadInput: as :func:`read_documents`, and if there is no document, or several.
    """
    documents = read_documents(field, path)
    if len(documents) != 1:
        raise BadInput(field, str(path), f"mend it: write one document, not {len(documents)}")
    return documents[0]


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError for bad JSON, a duplicate key or NaN."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Raise ValueError for a duplicate key."""
    unique_pairs: dict[str, Any] = {}
    for key, content in pairs:
        if key in unique_pairs:
            raise ValueError(f"{key!r} is there twice")
        unique_pairs[key] = content
    return unique_pairs


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no number {name}")


def parse_yaml(text: str | bytes) -> list[Any]:
    """Return the documents of a YAML or JSON text, without empty ones.

    Raises:
        ValueError: if the text is not YAML, has a key twice, or is nested too deeply.
    """
    import yaml

    loader_class = getattr(
        yaml, "CSafeLoader", yaml.SafeLoader
    )  # plain values alone; the loader in C is ten times as fast
    documents = []
    try:
        _require_shallow(text, loader_class)
        loader = loader_class(text)
        try:
            while loader.check_node():
                node = loader.get_node()
                _require_unique_keys(loader, node)
                documents.append(loader.construct_document(node))
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    return [document for document in documents if document is not None]


def _require_shallow(text: str | bytes, loader_class: Any) -> None:
    """Raise ValueError for a text that is nested too deeply.

    The composer, which recurses, would crash the process.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, loader_class):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > _DEPTH_MAX:
            raise ValueError(
                f"it is nested too deeply, line {event.start_mark.line + 1}: {_DEPTH_MAX} levels at most"
            )


def _require_unique_keys(loader: Any, root: Any) -> None:
    """Raise ValueError for a mapping with one key twice, or a node that contains itself.

    The nodes are checked before values are made of them: a merge (``<<``) adds keys that may be
    overridden.
    """
    import yaml

    finished: set[int] = set()

    def visit(node: Any, above: frozenset[int]) -> None:
        if id(node) in above:
            raise ValueError(f"a value contains itself, line {node.start_mark.line + 1}")
        if id(node) in finished or isinstance(node, yaml.ScalarNode):
            return
        inner = above | {id(node)}
        if isinstance(node, yaml.MappingNode):
            _require_unique(loader, [key for key, _ in node.value])
            parts = [part for pair in node.value for part in pair]
        else:
            parts = node.value
        for part in parts:
            visit(part, inner)
        finished.add(id(node))

    visit(root, frozenset())


def _require_unique(loader: Any, keys: list[Any]) -> None:
    """Raise ValueError if two keys of a mapping are equal."""
    import yaml

    keys_so_far: set[Any] = set()
    for node in keys:
        if not isinstance(node, yaml.ScalarNode):
            continue  # the constructor refuses what cannot be a key
        key = "<<" if node.tag == "tag:yaml.org,2002:merge" else loader.construct_object(node)
        if key in keys_so_far:
            raise ValueError(f"{key!r} is there twice, line {node.start_mark.line + 1}")
        keys_so_far.add(key)
