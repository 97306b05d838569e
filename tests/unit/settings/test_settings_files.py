"""Settings files: every reader splits documents and refuses a repeated key in the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaoskit.cli.app import run
from chaoskit.elastic.settings import read_policy
from chaoskit.elastic.traces import read_trace
from chaoskit.errors import BadInput
from chaoskit.experiment.plan import planfile
from chaoskit.nightly import plan as nightly
from chaoskit.rules import read_rules
from chaoskit.settings_file import parse_json, parse_yaml, read_documents
from chaoskit.sla import promises
from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.machines import machine_commands

_RULE = "name: {name}\nlogPattern: x\n"

#: Reader of settings -> (its function, name of the file, its text with a repeated key, the key).
_TWICE: dict[str, tuple[Callable[[Path], Any], str, str, str]] = {
    "rules": (read_rules, "r.yaml", "- name: a\n  logPattern: x\n  logPattern: y\n", "logPattern"),
    "rules in JSON": (
        read_rules,
        "r.json",
        '[{"name": "a", "logPattern": "x", "name": "b"}]',
        "name",
    ),
    "rules in TOML": (read_rules, "r.toml", "a = 1\na = 2\n", "Cannot overwrite"),
    "SLAs": (promises.load, "s.yaml", "version: 1\nslas: []\nslas: []\n", "slas"),
    "night": (nightly.load, "n.yaml", "version: 1\nname: a\nname: b\ntests: [a]\n", "name"),
    "elastic policy": (
        lambda path: read_policy(path.read_bytes()),
        "e.yaml",
        "elasticPolicy:\n  minReplicas: 1\n  maxReplicas: 2\n  minReplicas: 2\n",
        "minReplicas",
    ),
    "pod template": (
        lambda path: template.read(str(path)),
        "t.yaml",
        "spec:\n  containers: []\nspec: {}\n",
        "spec",
    ),
    "levers": (
        lambda path: machine_commands.read(str(path)),
        "l.yaml",
        "cut: {do: [a], undo: [b]}\ncut: {do: [c], undo: [d]}\n",
        "cut",
    ),
    "plan": (
        planfile.load,
        "p.json",
        '{"version": 2, "job": "gpt", "steps": 3, "steps": 30}',
        "steps",
    ),
    "trace": (
        read_trace,
        "c.json",
        '{"metadata": {"gap_seconds": 1}, "data": [1], "data": [2]}',
        "data",
    ),
}


@pytest.mark.parametrize("place", _TWICE)
def test_a_repeated_key_is_refused_by_name(place: str, tmp_path: Path) -> None:
    reader, name, text, key = _TWICE[place]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadInput) as refused:
        reader(path)
    message = str(refused.value)
    assert key in message
    assert "twice" in message or key == "Cannot overwrite"
    assert "\n" not in message


@pytest.mark.parametrize("option", ["--set", "--setting"])
def test_a_repeated_option_of_a_launch_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["launch", "gpt", option, "slow_steps=20", option, "slow_steps=30"]) == 2
    message = capsys.readouterr().err
    assert "slow_steps" in message
    assert "twice" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("separator", ["---", "--- ", "---\t", "--- # the next one", "...\n---"])
def test_no_line_behind_a_separator_is_lost(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    documents = [_RULE.format(name=name) for name in "abc"]
    path.write_text(f"{separator.removeprefix('...').strip()}\n" + f"{separator}\n".join(documents))
    assert [document["name"] for document in read_documents("rules", path)] == ["a", "b", "c"]


def test_rules_of_several_documents_keep_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("---\n- name: a\n  logPattern: x\n---\n- name: b\n  logPattern: y\n")
    assert [rule.name for rule in read_rules(path)] == ["a", "b"]


def test_a_separator_inside_a_text_separates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text('script: |\n  echo a\n  ---\n  echo b\nquoted: "a\n  --- b"\n')
    (document,) = read_documents("rules", path)
    assert document["script"] == "echo a\n---\necho b\n"


def test_anchors_and_merged_keys_are_no_repetition() -> None:
    text = (
        "base: &base {a: 1, b: 2}\nmore: &more\n  <<: *base\n  b: 3\nmost:\n  <<: *more\n  a: 4\n"
    )
    (document,) = parse_yaml(text)
    assert document["most"] == {"a": 4, "b": 3}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: {c: 1, 'c': 2}\n", "'c' is there twice, line 2"),
        ("1: a\n0x1: b\n", "1 is there twice"),
        ("a: &x [*x]\n", "contains itself"),
        ("? [1]\n: a\n", "unhashable"),
        ("[" * 5000, "nested too deeply"),
        ("[" * 1_000_000, "nested too deeply"),
        ("a: [", "flow node"),
        ("\0", "not allowed|unacceptable"),
    ],
)
def test_what_is_no_settings_file_is_a_value_error(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_yaml(text)


@pytest.mark.parametrize(
    "text", ['{"a": {"b": 1, "b": 1}}', "[NaN]", "[" * 100_000, '{"a": ', b"\xff\xfe"]
)
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_json_and_yaml_mean_the_same() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    assert parse_json(json.dumps(value)) == value
    assert parse_yaml(json.dumps(value)) == [value]
