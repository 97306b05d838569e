"""The grammar for the names of nodes, at each place that takes a name."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.waiting import LIMIT_S

from chaoskit import BadInput, RunClient, RunConfig
from chaoskit.config import validate
from chaoskit.elastic.client import Door, open_door
from chaoskit.experiment.plan.requests import Requests
from chaoskit.health import Quarantine
from chaoskit.job import resolve_job
from chaoskit.launcher import control_api
from chaoskit.nodename import GRAMMAR, name_of_this_machine, require_node_name
from chaoskit.wire.messages import NoticeCancelled, SpotNotice

GOOD = ["a", "0", "node2", "gpu-17", "a--b", "a" * 63]
BAD = [
    "",
    " ",
    "-a",
    "a-",
    "Node2",
    "node_2",
    "node.2",
    "node 2",
    "node2\n",
    "nöde",
    "٢",
    "../node2",
    "\x1b[31m",
    "a" * 64,
]


@pytest.mark.parametrize("name", GOOD)
def test_a_label_is_a_name(name: str, tmp_path: Path) -> None:
    """The list of excluded nodes accepts the label."""
    require_node_name("node", name)
    assert Quarantine(tmp_path).add(name, "why").node == name
    assert Quarantine(tmp_path).kept_out() == (name,)


@pytest.fixture
def client(tmp_path: Path) -> RunClient:
    open_door(tmp_path, Door("http://127.0.0.1:1", "token", os.getpid()))
    return RunClient(tmp_path)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Door]:
    with control_api.listening(Requests(), tmp_path) as door:
        yield door


def _checked(**settings: Any) -> None:
    validate(RunConfig(job=resolve_job("gpt"), **settings))


#: Entries for a name, by the field that is named.
WAYS: dict[str, tuple[str, Callable[[Path, Any], object]]] = {
    "node cordon": ("node", lambda directory, name: Quarantine(directory).add(name, "why")),
    "node uncordon": ("node", lambda directory, name: Quarantine(directory).release(name, "why")),
    "a notice": ("node", lambda directory, name: Requests().tell(SpotNotice(name, 1.0))),
    "a notice taken back": ("node", lambda directory, name: Requests().tell(NoticeCancelled(name))),
    "quarantined": ("quarantined", lambda directory, name: _checked(quarantined=("node1", name))),
    "on probation": ("on_probation", lambda directory, name: _checked(on_probation=(name,))),
}


@pytest.mark.parametrize("name", BAD, ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_anything_else_is_bad_input(way: str, name: str, tmp_path: Path) -> None:
    """The error names the field, the value and the grammar, and nothing is written."""
    field, enter = WAYS[way]
    with pytest.raises(BadInput) as refused:
        enter(tmp_path, name)
    assert (refused.value.field, refused.value.value) == (field, name)
    assert GRAMMAR in refused.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*BAD, None, 2], ids=repr)
def test_the_client_of_a_run_refuses_it_before_it_asks(client: RunClient, name: Any) -> None:
    """There is no server at that address: a request would raise another error."""
    for ask in (lambda: client.drain(name, 1.0), lambda: client.cancel_drain(name)):
        with pytest.raises(BadInput) as refused:
            ask()
        assert (refused.value.field, refused.value.value) == ("node", name)


@pytest.mark.parametrize("act", ["drain", "cancel-drain"])
def test_the_control_api_refuses_it(listening: Door, act: str) -> None:
    """The server answers with status 400, with the field, the value and the grammar."""
    fields = {"node": "../node2"} | ({"grace_s": 1.0} if act == "drain" else {})
    headers = {"Authorization": f"Bearer {listening.token}"}
    request = urllib.request.Request(f"{listening.url}/{act}", msgspec.json.encode(fields), headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=LIMIT_S)
    answer = msgspec.json.decode(refused.value.read())
    assert (refused.value.code, answer["field"], answer["value"]) == (400, "node", "../node2")
    assert GRAMMAR in answer["remedy"]


@pytest.mark.parametrize(
    ("key", "name"), [("../a", "../a"), ("a", "b")], ids=["no name", "two names"]
)
def test_a_list_with_another_name_is_damaged(tmp_path: Path, key: str, name: str) -> None:
    """A list that was written by hand lets no node in under a name that no node can have."""
    entry = {"node": name, "reason": "why", "since": "now", "by": "me"}
    Quarantine(tmp_path).path.write_bytes(
        msgspec.json.encode({"version": 1, "entries": {key: entry}})
    )
    with pytest.raises(BadInput, match="repair or remove this file") as refused:
        Quarantine(tmp_path).kept_out()
    assert refused.value.field == "quarantine"


@pytest.mark.parametrize(
    ("host", "name"),
    [("gpu-17", "gpu-17"), ("GPU-17.example.org", "gpu-17"), ("gpu_17", None), ("", None)],
)
def test_a_machine_has_the_first_label_of_its_host(
    monkeypatch: pytest.MonkeyPatch, host: str, name: str | None
) -> None:
    """A host needs another name if its own is invalid for a node."""
    monkeypatch.setattr("socket.gethostname", lambda: host)
    if name is not None:
        assert name_of_this_machine() == name
        return
    with pytest.raises(BadInput, match="--node"):
        name_of_this_machine()
