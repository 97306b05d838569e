"""Timeouts of a training stack, found in its files: which there are, in seconds, and where they stand.

Names and defaults, and where they are documented:

* chaoskit: :class:`chaoskit.config.RunConfig`, read from there.
* torchrun: ``torch/distributed/run.py`` and ``create_handler`` in
  ``torch/distributed/elastic/rendezvous/dynamic_rendezvous.py`` of torch 2.13.
* ProcessGroupNCCL: ``ProcessGroupNCCL.hpp`` and ``.cpp`` of the same, and
  https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
* torchft: ``LighthouseOpt`` in ``src/lighthouse.rs`` and ``Manager`` in ``torchft/manager.py`` of
  https://github.com/pytorch/torchft
* NVRx: https://nvidia.github.io/nvidia-resiliency-ext/fault_tolerance/api/config.html and ``Wrapper`` in
  ``inprocess/wrap.py`` of https://github.com/NVIDIA/nvidia-resiliency-ext
* Kubernetes: https://kubernetes.io/docs/concepts/workloads/pods/pod-termination/
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.logrule import Rule
from chaoskit.rules.files import read_documents, read_text
from chaoskit.rules.rules import LIST_KEYS, find_lists, parse_rules

_MS = 0.001


@dataclass(frozen=True)
class Known:
    """A setting that is understood.

    Args:
        system: whose it is.
        name: as it is written, without dashes or a prefix.
        default: in its own unit; None if it is off.
        unit_s: seconds in one of it; 1 for counts and switches, too.
        only_below: it counts only below one of these keys, or in an option of this name: others use the name, too.
    """

    system: str
    name: str
    default: float | None
    unit_s: float = 1.0
    only_below: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.system}.{self.name}"


def _chaoskit() -> list[Known]:
    numbers = [one for one in msgspec.structs.fields(RunConfig) if isinstance(one.default, (int, float))]
    return [
        Known("chaoskit", one.name, float(one.default), _MS if one.name.endswith("_ms") else 1.0)
        for one in numbers
        if not isinstance(one.default, bool) and one.name.endswith(("_s", "_ms", "_beats"))
    ]


_RDZV = ("rdzv_conf", "rdzv_configs")
_IN_PROCESS = ("inprocess", "in_process", "inprocess_restart", "wrapper")

KNOWN = [
    *_chaoskit(),
    Known("torchrun", "join_timeout", 600, only_below=_RDZV),
    Known("torchrun", "last_call_timeout", 30, only_below=_RDZV),
    Known("torchrun", "close_timeout", 30, only_below=_RDZV),
    Known("torchrun", "heartbeat_timeout", 5, only_below=_RDZV),
    Known("torchrun", "keep_alive_interval", 5, only_below=_RDZV),
    Known("torchrun", "keep_alive_max_attempt", 3, only_below=_RDZV),
    Known("torchrun", "monitor_interval", 0.1),
    Known("torchrun", "shutdown_timeout", 30),
    Known("nccl", "process_group_timeout", 600),
    Known("nccl", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480),
    Known("nccl", "TORCH_NCCL_ASYNC_ERROR_HANDLING", 3),
    Known("nccl", "TORCH_NCCL_ENABLE_MONITORING", 1),
    Known("nccl", "TORCH_NCCL_BLOCKING_WAIT", 0),
    Known("torchft", "TORCHFT_TIMEOUT_SEC", 60),
    Known("torchft", "TORCHFT_QUORUM_TIMEOUT_SEC", 60),
    Known("torchft", "TORCHFT_CONNECT_TIMEOUT_SEC", 60),
    Known("torchft", "join_timeout_ms", 60_000, _MS),
    Known("torchft", "heartbeat_timeout_ms", 5_000, _MS),
    Known("torchft", "quorum_tick_ms", 100, _MS),
    Known("nvrx", "initial_rank_heartbeat_timeout", 3600),
    Known("nvrx", "rank_heartbeat_timeout", 2700),
    Known("nvrx", "workload_check_interval", 5),
    Known("nvrx-inprocess", "soft_timeout", 60),
    Known("nvrx-inprocess", "hard_timeout", 90),
    Known("nvrx-inprocess", "barrier_timeout", 120),
    Known("nvrx-inprocess", "heartbeat_timeout", 30, only_below=_IN_PROCESS),
    Known("nvrx-inprocess", "termination_grace_time", 5),
    Known("nvrx-inprocess", "monitor_process_interval", 1),
    Known("nvrx-inprocess", "monitor_thread_interval", 1),
    Known("nvrx-inprocess", "progress_watchdog_interval", 1),
    Known("kubernetes", "terminationGracePeriodSeconds", 30),
]

#: Other names of the same: what frameworks call the timeout of ``init_process_group``, and an environment variable.
_ALIASES = {
    "ddp_timeout": ("process_group_timeout", 1.0),  # Hugging Face TrainingArguments
    "distributed_timeout_minutes": ("process_group_timeout", 60.0),  # Megatron-LM
    "train_timeout_seconds": ("process_group_timeout", 1.0),  # torchtitan, [comm]
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": ("shutdown_timeout", 1.0),
}
_BY_NAME: dict[str, list[Known]] = {}
for _one in KNOWN:
    _BY_NAME.setdefault(_one.name, []).append(_one)

#: What is used where there is a Kubernetes object of this kind. HyperPod's agent is torchrun's, on GPUs.
_KINDS = {kind: {"kubernetes"} for kind in ("Pod", "Job", "JobSet", "PyTorchJob", "TrainJob")}
_KINDS["HyperPodPyTorchJob"] = {"kubernetes", "torchrun", "nccl"}

_VALUE = r"[\"']?((?!-)[\w.=,:${}-]+)"
_WORD = re.compile(rf"(?<![\w-])(?:(--?[A-Za-z][\w-]*)(?:=|\s+){_VALUE}|([A-Za-z_]\w*)={_VALUE})")


_UNITS = {"milliseconds": _MS, "seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
_TIMEDELTA = re.compile(rf"(?:datetime\.)?timedelta\(({'|'.join(_UNITS)})\s*=\s*([\d._]+)\)")
_GROUP_TIMEOUT = re.compile(r"(init_process_group\([^()]*?)\btimeout=")


@dataclass(frozen=True)
class Setting:
    """A value that counts.

    Args:
        value: in seconds, or a number without a unit; infinity for switched off.
        where: the file it stands in, "" for a default.
    """

    known: Known
    value: float
    where: str

    def __str__(self) -> str:
        shown = "off" if math.isinf(self.value) else f"{self.value / self.known.unit_s:g}"
        return f"{self.known.name}={shown}{'' if self.where else ' (default)'}"


@dataclass
class Settings:
    """The settings of all files together. A later file overrides an earlier one.

    Attributes:
        rules: the log rules in them, with the files.
    """

    given: dict[str, Setting] = field(default_factory=dict)
    systems: set[str] = field(default_factory=set)
    rules: list[tuple[Rule, str]] = field(default_factory=list)

    def get(self, key: str) -> Setting | None:
        """The setting ``system.name``: what is given or, of a system that is used at all, the default."""
        if key in self.given:
            return self.given[key]
        known = next(one for one in KNOWN if one.key == key)
        if known.system not in self.systems or known.default is None:
            return None
        return Setting(known, known.default * known.unit_s, "")


def settings_of(config: RunConfig) -> Settings:
    """The settings and log rules of a run of our own."""
    numbers = {one.key: one for one in KNOWN if one.system == "chaoskit"}
    given = {}
    for known in numbers.values():
        value = float(getattr(config, known.name))
        if value != known.default:
            given[known.key] = Setting(known, value * known.unit_s, "RunConfig")
    return Settings(given, {"chaoskit"}, [(rule, "RunConfig") for rule in config.rules])


def read_settings(paths: Iterable[Path]) -> Settings:
    """What files say about timeouts: YAML, JSON and TOML by their keys; others, such as scripts, as text.

    Raises:
        BadInput: a file cannot be read, a value is no number, or no file holds a setting that is known.
    """
    found = Settings()
    for path in paths:
        one = _read(path)
        if not (one.given or one.rules or one.systems):
            raise BadInput("file", str(path), "name a file with a timeout of a known system or with log rules in it")
        found.given |= one.given
        found.systems |= one.systems
        found.rules += one.rules
    return found


def _read(path: Path) -> Settings:
    found = Settings()
    if path.suffix not in (".yaml", ".yml", ".json", ".toml"):
        text = read_text("file", path)
        if path.suffix == ".py":
            _of_text(found, _plain_python(text), str(path), _IN_PROCESS if "inprocess" in text else ())
        else:
            _of_text(found, text, str(path), ())
        return found
    for document in read_documents("file", path):
        for rules in find_lists(document):
            found.rules += [(rule, str(path)) for rule in parse_rules(rules)]
        _collect(found, document, str(path), ())
    return found


def _collect(found: Settings, value: Any, where: str, above: tuple[str, ...]) -> None:
    if isinstance(value, Mapping):
        if "name" in value and "value" in value:  # env of a container
            _take(found, str(value["name"]), value["value"], where, above)
        found.systems |= _KINDS.get(str(value.get("kind")), set())
        for key, inner in value.items():
            if key in LIST_KEYS:
                continue
            if isinstance(inner, str) and str(key).replace("-", "_") in _RDZV:
                _of_text(found, inner.replace(",", " "), where, _RDZV)
            elif isinstance(inner, (Mapping, list)):
                _collect(found, inner, where, (*above, str(key)))
            else:
                _take(found, str(key), inner, where, above)
    elif isinstance(value, list):
        if all(isinstance(one, (str, int, float)) for one in value):  # a command line
            _of_text(found, " ".join(map(str, value)), where, above)
        else:
            for inner in value:
                _collect(found, inner, where, above)


def _of_text(found: Settings, text: str, where: str, above: tuple[str, ...]) -> None:
    """Options and variables in a script or a command line."""
    for word, system in (("torchrun", "torchrun"), ("hyperpodrun", "torchrun"), ("torchft_lighthouse", "torchft")):
        if re.search(rf"\b{word}\b", text):
            found.systems.add(system)
    plain = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    for name, value in _words(plain):
        if name in _RDZV:
            _of_text(found, value.replace(",", " "), where, _RDZV)
        elif re.fullmatch(r"-?\d+(\.\d+)?", value):  # $VARIABLES are not followed
            _take(found, name, value, where, above)


def _plain_python(text: str) -> str:
    """A script with ``timedelta``s as seconds, and the timeout of ``init_process_group`` under its name here."""

    def seconds(match: re.Match[str]) -> str:
        return f"{float(match[2]) * _UNITS[match[1]]:g}"

    spelt = re.sub(r"\s*=\s*", "=", _TIMEDELTA.sub(seconds, text))
    return _GROUP_TIMEOUT.sub(r"\1process_group_timeout=", spelt)


def _words(text: str) -> Iterator[tuple[str, str]]:
    """Names and values of options (``--name value``, ``--name=value``) and of variables (``NAME=value``)."""
    for option, given, variable, value in _WORD.findall(text):
        name = option.lstrip("-").replace("-", "_") if option else variable
        yield name, (given or value).rstrip(",")


def _take(found: Settings, name: str, value: Any, where: str, above: tuple[str, ...]) -> None:
    name, unit = _ALIASES.get(name, (name, None))
    name = re.sub(r"^ft_(?:param_)?", "", name)  # NVRx's launcher: --ft-rank-heartbeat-timeout
    for known in _BY_NAME.get(name, ()):
        if known.only_below and not set(known.only_below) & set(above):
            continue
        number = math.inf if value is None else _number(name, value, where) * (unit or known.unit_s)
        found.given[known.key] = Setting(known, number, where)
        found.systems.add(known.system)


def _number(name: str, value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadInput(f"{where}: {name}", value, "write a number") from None
