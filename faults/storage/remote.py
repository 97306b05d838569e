"""Fault ``RemoteOutage``: the store of the remote tier refuses, fails or delays requests.

-> substrate/object_store/process.py is the proxy that does it, by the rules in troubles.py.
-> checkpoint/remote/uploader.py: what the job does when an upload fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import Evidence, SharedStore
from chaoskit.faults.target import Target
from chaoskit.substrate.object_store.troubles import (
    ErrorReply,
    Lag,
    ResetConnection,
    Stall,
    StoreOutage,
    Trouble,
)

_SLOW_DOWN = 503
#: Mode of the store -> effect on the requests, as the proxy counts them.
_MODES = {
    "refuse": "turned away {met} connections",
    "throttle": "answered {met} requests with 503",
    "slow": "held up {met} requests",
    "reset": "reset {met} requests",
    "stall": "taken {met} requests, and answered none",
}
MODES = tuple(_MODES)


@dataclass(frozen=True, kw_only=True)
class RemoteOutage(Fault):
    """Let the store of the remote tier be out for a while, for all nodes.

    A proxy of chaoskit stands before the store for the whole run: its nodes get its address as
    ``endpoint``.

    Args:
        rank: the rank that waits until the store is out.
        mode: ``refuse``: each connection is reset as soon as it is made; ``throttle``: every
            request is answered by 503 (slow down); ``slow``: answers come ``delay_ms`` later;
            ``reset``: connections are reset in the body of a request; ``stall``: requests are
            taken, and never answered.
        delay_ms: for ``slow``, milliseconds that are added to each answer.
        heal_after_s: seconds after the first request or connection that it strikes at which it
            ends; None for the end of the run.
    """

    rank: int | str = 0
    mode: str = "refuse"
    delay_ms: float = 500.0
    heal_after_s: float | None = None

    family: ClassVar[str] = "checkpoint"
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    effect: ClassVar[str] = "the store of the remote tier refuses, fails or delays requests"
    evidence: ClassVar[str] = "requests that the proxy before the store has refused or held up"
    stands_for: ClassVar[str] = (
        "object stores that are out or throttle, and networks on the way to them"
    )
    unlisted: ClassVar[str] = (
        "the tables count what ends a job; a store that is out ends only uploads"
    )
    impact: ClassVar[str] = "uploads are tried again until the store is back; training goes on"
    undo: ClassVar[str] = "nothing is left: the proxy ends with the run"
    substrates: ClassVar[tuple[str, ...]] = ("local",)
    of_runtime: ClassVar[bool] = True
    of_store: ClassVar[bool] = True
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20, "heal_after_s": 2.0}
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"mode": mode} for mode in MODES)
    example: ClassVar[str] = """chaos.run(
    "gpt",
    nodes=4,
    steps=60,
    disk={{"target": "/tmp/job", "every_steps": 5}},
    remote={{"target": "s3://bucket/job", "endpoint": "http://127.0.0.1:9000"}},
    resume=True,
    faults=[{fault}],
)"""

    @property
    def trouble(self) -> Trouble:
        """The trouble that the proxy makes."""
        troubles: dict[str, Trouble] = {
            "refuse": StoreOutage(),
            "throttle": ErrorReply(status=_SLOW_DOWN),
            "slow": Lag(delay_ms=self.delay_ms),
            "reset": ResetConnection(),
            "stall": Stall(),
        }
        return troubles[self.mode]

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.mode not in MODES:
            raise BadInput("mode", self.mode, f"use one of {', '.join(MODES)}")
        require_seconds("delay_ms", self.delay_ms, above_0=True)
        if self.heal_after_s is not None:
            require_seconds("heal_after_s", self.heal_after_s, above_0=True)

    def require(self, config: RunConfig) -> None:
        if config.remote is None:
            raise BadInput(
                "remote",
                config.remote,
                f"upload snapshots: {self.kind} strikes the store that they go to",
            )
        if not config.remote.endpoint.startswith("http://"):
            remedy = "name the address of the store, http://HOST:PORT: a proxy stands before it"
            raise BadInput("remote.endpoint", config.remote.endpoint, remedy)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        assert target.store is not None
        with target.holding(target.store.apply(self.trouble)) as outage:
            target.release()

            source, effect = "the proxy before the store", _MODES[self.mode]
            yield await target.counted(
                outage,
                SharedStore(target.store.url),
                source,
                lambda met: f"{source} has {effect.format(met=met)}",
            )
            if self.heal_after_s is None:
                await target.until_end()
            else:
                await target.sleep(self.heal_after_s)
        target.lifted()
