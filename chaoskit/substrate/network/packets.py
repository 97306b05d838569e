"""What becomes of the packets that this network namespace receives, by where they come from.

For nodes that have a network namespace already, and no bridge of ours before it: such as pods. What drops is a table of
nftables, what holds up a rule of iptables before a queue (``nft_queue`` is no part of some kernels). All of it vanishes
with the namespace.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Sequence

from chaoskit.errors import HarnessError
from chaoskit.substrate.core import commands
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.echo import Echoes, EchoThread, open_socket
from chaoskit.substrate.core.traffic import Profile, nft_packets, verdicts
from chaoskit.substrate.network.packet_queue import PacketQueues

_COUNT_S = 0.2  # between two looks of nft: each starts a process
_PROBE = "ckprobe"
_INPUT = "type filter hook input priority 0;"


class DropReceived(Action, frozen=True, kw_only=True):
    """Drop what comes from these IPv4 addresses, or answer its TCP segments with a reset. Shown: packets that met it.

    Fields as in :class:`chaoskit.substrate.core.traffic.Block`.
    """

    sources: tuple[str, ...]
    loud: bool = False
    port: int = 0
    share: float = 1.0


class HoldReceived(Action, frozen=True, kw_only=True):
    """Hold up what comes from these IPv4 addresses. Shown: packets that were held up."""

    sources: tuple[str, ...]
    delay_ms: float
    jitter_ms: float = 0.0


class SendEchoes(Action, frozen=True):
    """Send echoes to an address, one after the other; one that is not answered within ``timeout_s`` is lost.

    Shown: nothing. Its results are asked for.
    """

    address: str
    timeout_s: float


class ReceivedPackets:
    """The backend of these actions, for a process with CAP_NET_ADMIN and CAP_NET_RAW. All are lifted when it closes."""

    actions: frozenset[type[Action]] = frozenset({DropReceived, HoldReceived, SendEchoes})

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._queues = _Queues()
        self._applied: list[Applied] = []

    def why_not(self, action: type[Action]) -> str:
        """Why an action of this kind cannot be done here; "" if it can. Tried with rules that no packet meets."""
        try:
            if action is SendEchoes:
                open_socket().close()
                return ""
            if action is HoldReceived:
                _iptables("--new-chain", _PROBE)
                try:
                    _iptables("--append", _PROBE, *_to_queue("192.0.2.1", 1))
                finally:
                    _iptables("--flush", _PROBE)
                    _iptables("--delete-chain", _PROBE)
                return ""
            kinds = (DropReceived(sources=(), loud=True), DropReceived(sources=(), share=0.5))
            rules = [rule for kind in kinds for rule in _drops("192.0.2.1", kind)]
            _nft("-f", "-", script=_table(_PROBE, _INPUT, rules))
            _nft("delete", "table", "inet", _PROBE)
        except (HarnessError, OSError) as error:
            return str(error)
        return ""

    def apply(self, node: str, action: Action) -> Applied:
        match action:
            case DropReceived():
                made: Applied = _Dropping(next(self._numbers), action)
            case HoldReceived():
                made = self._queues.hold(action)
            case SendEchoes(address, timeout_s):
                made = Sending(address, timeout_s)
            case _:
                raise HarnessError(f"{type(action).__name__} is not done to packets")
        self._applied.append(made)
        return made

    def release(self, node: str | None = None) -> None:
        """No rule keeps a process from ending."""

    def close(self) -> None:
        for one in self._applied:
            one.lift()
        self._queues.close()


class _Dropping:
    def __init__(self, number: int, action: DropReceived) -> None:
        self._table, self._last, self._looked_s = f"chaoskit{number}", 0, 0.0
        self._is_lifted = False
        lines = [line for source in action.sources for line in _drops(source, action)]
        _nft("-f", "-", script=_table(self._table, _INPUT, lines))

    def shown(self) -> int:
        if not self._is_lifted and time.monotonic() > self._looked_s + _COUNT_S:
            self._last = nft_packets(_nft("--json", "list", "table", "inet", self._table))
            self._looked_s = time.monotonic()
        return self._last

    def lift(self) -> bool:
        if not self._is_lifted:
            self._looked_s = 0.0
            try:
                self.shown()
            finally:  # a count that cannot be had leaves no rule behind
                _nft("delete", "table", "inet", self._table)
                self._is_lifted = True
        return True


class _Queues:
    """Has packets held up, by all actions in force together: one queue for each source."""

    def __init__(self) -> None:
        self._queues: PacketQueues | None = None
        self._numbers: dict[str, int] = {}  # source -> queue
        self._held: list[HoldReceived] = []
        self._bound = set[str]()

    def hold(self, action: HoldReceived) -> _Held:
        """Hold up more."""
        before = self.count(action)
        self._held.append(action)
        self._bind()
        return _Held(self, action, before)

    def let_go(self, action: HoldReceived) -> None:
        """Hold up less."""
        self._held.remove(action)
        self._bind()

    def count(self, action: HoldReceived) -> int:
        """How many packets from its sources were held up so far."""
        queues = self._queues
        return (
            sum(queues.held[self._numbers.get(source, 0)] for source in action.sources)
            if queues
            else 0
        )

    def _bind(self) -> None:
        wanted: dict[str, Profile] = {}
        for action in self._held:
            for source in action.sources:
                more = Profile(delay_ms=action.delay_ms, jitter_ms=action.jitter_ms)
                wanted[source] = wanted[source] + more if source in wanted else more
        self._queues = self._queues or PacketQueues()
        for source in self._bound - wanted.keys():
            _iptables("--delete", "PREROUTING", *_to_queue(source, self._numbers[source]))
            self._queues.unbind(self._numbers[source])
            self._bound.remove(source)
        for source, profile in wanted.items():
            number = self._numbers.setdefault(source, len(self._numbers) + 1)
            self._queues.bind(number, profile)
            if source not in self._bound:
                _iptables("--append", "PREROUTING", *_to_queue(source, number))
                self._bound.add(source)

    def close(self) -> None:
        """Hold up nothing."""
        self._held.clear()
        if self._queues is not None:
            self._bind()
            self._queues.close()


class _Held:
    """What one action holds up."""

    def __init__(self, queues: _Queues, action: HoldReceived, before: int) -> None:
        self._queues, self._action, self._before = queues, action, before
        self._last: int | None = None  # once it is lifted

    def shown(self) -> int:
        return self._queues.count(self._action) - self._before if self._last is None else self._last

    def lift(self) -> bool:
        if self._last is None:
            self._last = self.shown()
            self._queues.let_go(self._action)
        return True


class Sending:
    """Echoes that are sent until that is lifted."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._thread = EchoThread(Echoes(open_socket()), address, timeout_s)

    def results_ms(self) -> list[float | None]:
        """The round trips so far; None for an echo that was lost."""
        return self._thread.results_ms()

    def shown(self) -> int:
        return 0

    def lift(self) -> bool:
        self._thread.close()
        return True


def _drops(source: str, action: DropReceived) -> list[str]:
    return verdicts(f"ip saddr {source}", loud=action.loud, port=action.port, share=action.share)


def _table(name: str, hook: str, lines: Sequence[str]) -> str:
    return "\n".join([f"table inet {name} {{", "chain received {", hook, *lines, "}", "}", ""])


def _to_queue(source: str, number: int) -> list[str]:
    return ["--source", source, "--jump", "NFQUEUE", "--queue-num", str(number), "--queue-bypass"]


def _nft(*arguments: str, script: str = "") -> bytes:
    return _call("nftables", ["nft", *arguments], script)


def _iptables(*arguments: str) -> bytes:
    return _call("iptables", ["iptables", "--wait", "--table", "mangle", *arguments])


def _call(package: str, command: list[str], script: str = "") -> bytes:
    try:
        done = commands.call(command, script)
    except subprocess.TimeoutExpired as error:
        raise HarnessError(str(error)) from error
    except FileNotFoundError:
        raise HarnessError(
            f"{command[0]} not found: install the package {package} where the network is"
        ) from None
    if done.returncode != 0:
        raise HarnessError(f"{' '.join(command)}: {done.stderr.decode().strip()}")
    return done.stdout
