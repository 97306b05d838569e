"""Actions on the packets that this network namespace receives, by source address.

They serve nodes that have a network namespace already and no bridge of chaoskit, such as pods.
Packets are dropped by a table of nftables, and delayed by a rule of iptables with a queue (some
kernels lack ``nft_queue``). All of it vanishes with the namespace.

-> ``supervisor/actions.py`` applies them for the runner. ``kubernetes/pods/network.py``: which pods
get them for a change of the traffic. ``network/wiring.py``: the same on a bridge.
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

_COUNT_S = 0.2  # least interval of calls of nft, each of which starts a process
_PROBE = "ckprobe"
_INPUT = "type filter hook input priority 0;"


class DropReceived(Action, frozen=True, kw_only=True):
    """Drop packets from these IPv4 addresses, or answer their TCP segments with a reset.

    Shown: packets that were dropped or answered. Fields as in
    :class:`chaoskit.substrate.core.traffic.Block`.
    """

    sources: tuple[str, ...]
    loud: bool = False
    port: int = 0
    share: float = 1.0


class HoldReceived(Action, frozen=True, kw_only=True):
    """Delay packets from these IPv4 addresses. Shown: packets that were delayed."""

    sources: tuple[str, ...]
    delay_ms: float
    jitter_ms: float = 0.0


class SendEchoes(Action, frozen=True):
    """Send echoes to an address one after the other.

    An echo without an answer in ``timeout_s`` is lost. Shown: nothing. The results are requested
    instead.
    """

    address: str
    timeout_s: float


class ReceivedPackets:
    """Backend of these actions, for a process with CAP_NET_ADMIN and CAP_NET_RAW.

    Closing it lifts all of them. Its methods raise HarnessError or OSError if the kernel refuses.
    """

    actions: frozenset[type[Action]] = frozenset({DropReceived, HoldReceived, SendEchoes})

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._queues = _Queues()
        self._applied: list[Applied] = []

    def why_not(self, action: type[Action]) -> str:
        """Return why an action of this kind cannot be applied here; "" if it can.

        It is tried with rules that match no packet.
        """
        try:
            if action is SendEchoes:
                open_socket().close()
                return ""
            if action is HoldReceived:
                _iptables("--new-chain", _PROBE)
                try:
                    _iptables("--append", _PROBE, *_queue_rule("192.0.2.1", 1))
                finally:
                    _iptables("--flush", _PROBE)
                    _iptables("--delete-chain", _PROBE)
                return ""
            kinds = (DropReceived(sources=(), loud=True), DropReceived(sources=(), share=0.5))
            rules = [rule for kind in kinds for rule in _drop_rules("192.0.2.1", kind)]
            _nft("-f", "-", script=_table(_PROBE, _INPUT, rules))
            _nft("delete", "table", "inet", _PROBE)
        except (HarnessError, OSError) as error:
            return str(error)
        return ""

    def apply(self, node: str, action: Action) -> Applied:
        match action:
            case DropReceived():
                applied: Applied = _Dropping(next(self._numbers), action)
            case HoldReceived():
                applied = self._queues.hold(action)
            case SendEchoes(address, timeout_s):
                applied = Sending(address, timeout_s)
            case _:
                raise HarnessError(f"{type(action).__name__} is not an action on packets")
        self._applied.append(applied)
        return applied

    def release(self, node: str | None = None) -> None:
        """Do nothing: no rule keeps a process from ending."""

    def close(self) -> None:
        for applied in self._applied:
            applied.lift()
        self._queues.close()


class _Dropping:
    """Rules in force that drop or refuse packets, in a table of nftables of their own.

    The count is at most 0.2 s old.
    """

    def __init__(self, number: int, action: DropReceived) -> None:
        self._table, self._last, self._counted_s = f"chaoskit{number}", 0, 0.0
        self._is_lifted = False
        lines = [line for source in action.sources for line in _drop_rules(source, action)]
        _nft("-f", "-", script=_table(self._table, _INPUT, lines))

    def shown(self) -> int:
        if not self._is_lifted and time.monotonic() > self._counted_s + _COUNT_S:
            self._last = nft_packets(_nft("--json", "list", "table", "inet", self._table))
            self._counted_s = time.monotonic()
        return self._last

    def lift(self) -> bool:
        if not self._is_lifted:
            self._counted_s = 0.0
            try:
                self.shown()
            finally:  # remove the rule even if counting fails
                _nft("delete", "table", "inet", self._table)
                self._is_lifted = True
        return True


class _Queues:
    """Delays of all actions in force together: one queue for each source."""

    def __init__(self) -> None:
        self._queues: PacketQueues | None = None
        self._queue_numbers: dict[str, int] = {}  # source -> queue
        self._actions: list[HoldReceived] = []
        self._bound_sources = set[str]()

    def hold(self, action: HoldReceived) -> _Delay:
        """Start to delay packets for an action, and return the handle that lifts it."""
        count_before = self.count(action)
        self._actions.append(action)
        self._bind()
        return _Delay(self, action, count_before)

    def release_action(self, action: HoldReceived) -> None:
        """Stop delaying packets for an action."""
        self._actions.remove(action)
        self._bind()

    def count(self, action: HoldReceived) -> int:
        """Return how many packets from the action's sources were delayed so far."""
        queues = self._queues
        return (
            sum(queues.delayed[self._queue_numbers.get(source, 0)] for source in action.sources)
            if queues
            else 0
        )

    def _bind(self) -> None:
        """Make queues and rules those of all actions in force together."""
        profiles: dict[str, Profile] = {}
        for action in self._actions:
            for source in action.sources:
                added = Profile(delay_ms=action.delay_ms, jitter_ms=action.jitter_ms)
                profiles[source] = profiles[source] + added if source in profiles else added
        self._queues = self._queues or PacketQueues()
        for source in self._bound_sources - profiles.keys():
            _iptables("--delete", "PREROUTING", *_queue_rule(source, self._queue_numbers[source]))
            self._queues.unbind(self._queue_numbers[source])
            self._bound_sources.remove(source)
        for source, profile in profiles.items():
            number = self._queue_numbers.setdefault(source, len(self._queue_numbers) + 1)
            self._queues.bind(number, profile)
            if source not in self._bound_sources:
                _iptables("--append", "PREROUTING", *_queue_rule(source, number))
                self._bound_sources.add(source)

    def close(self) -> None:
        """Stop delaying packets, and remove all rules."""
        self._actions.clear()
        if self._queues is not None:
            self._bind()
            self._queues.close()


class _Delay:
    """A delay in force.

    Its count includes packets of its sources that another delay holds up at the same time.
    """

    def __init__(self, queues: _Queues, action: HoldReceived, count_before: int) -> None:
        self._queues, self._action, self._count_before = queues, action, count_before
        self._last: int | None = None  # set once it is lifted

    def shown(self) -> int:
        return (
            self._queues.count(self._action) - self._count_before
            if self._last is None
            else self._last
        )

    def lift(self) -> bool:
        if self._last is None:
            self._last = self.shown()
            self._queues.release_action(self._action)
        return True


class Sending:
    """Echoes that are sent until the action is lifted.

    Raises PermissionError without CAP_NET_RAW.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self._thread = EchoThread(Echoes(open_socket()), address, timeout_s)

    def results_ms(self) -> list[float | None]:
        """Return the round trips so far, in the order of sending; None for each lost echo."""
        return self._thread.results_ms()

    def shown(self) -> int:
        return 0

    def lift(self) -> bool:
        self._thread.close()
        return True


def _drop_rules(source: str, action: DropReceived) -> list[str]:
    return verdicts(f"ip saddr {source}", loud=action.loud, port=action.port, share=action.share)


def _table(name: str, hook: str, lines: Sequence[str]) -> str:
    """Return a script for ``nft -f`` that adds a table with one chain of these rules."""
    return "\n".join([f"table inet {name} {{", "chain received {", hook, *lines, "}", "}", ""])


def _queue_rule(source: str, number: int) -> list[str]:
    """Return the words of a rule of iptables that puts packets of a source into a queue."""
    return ["--source", source, "--jump", "NFQUEUE", "--queue-num", str(number), "--queue-bypass"]


def _nft(*arguments: str, script: str = "") -> bytes:
    return _call("nftables", ["nft", *arguments], script)


def _iptables(*arguments: str) -> bytes:
    return _call("iptables", ["iptables", "--wait", "--table", "mangle", *arguments])


def _call(package: str, command: list[str], script: str = "") -> bytes:
    """Run a command of a package, and return its output. Raises HarnessError if it fails."""
    try:
        result = commands.call(command, script)
    except subprocess.TimeoutExpired as error:
        raise HarnessError(str(error)) from error
    except FileNotFoundError:
        raise HarnessError(
            f"{command[0]} not found: install the package {package} in the image of the pod"
        ) from None
    if result.returncode != 0:
        raise HarnessError(f"{' '.join(command)}: {result.stderr.decode().strip()}")
    return result.stdout
