"""A Lease of a namespace: what one process at a time may do there.

A holder renews its Lease. One that has died does not, so a Lease that stays the same for as long as it says is taken by
the next. No clocks of two machines are compared: a process that waits counts by itself how long nothing has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api import ApiError, KubernetesApi

#: A Lease that has not been renewed for so long is taken by another one: more than an API server that stops, and
#: :class:`faults.StopApiServer`, usually last.
LEASE_S = 120
RENEW_S = 10.0
#: A holder that could not renew for so long gives up, long enough before another one may take over.
GIVE_UP_S = 90.0
#: Says in the environment of a holder what its name is: sessions are of it, and another process may go on as it.
HOLDER = "CHAOSKIT_NIGHT_HOLDER"
_LOOK_S = 1.0


class NamespaceLease:
    """One Lease, as a holder sees it.

    Args:
        holder: no other process has this name, but one that goes on where this one was killed.
        what: it is for, in the words of a refusal: ``a night``.
        lasts_s: without being renewed. A holder that dies is waited for that long.
    """

    def __init__(self, api: KubernetesApi, name: str, holder: str, *, what: str, lasts_s: int = LEASE_S) -> None:
        self._api, self._name, self._holder, self._what, self._lasts_s = api, name, holder, what, lasts_s
        self._renewed_s = 0.0

    def take(self, tell: Callable[[str], None]) -> str:
        """Hold it. A holder that may have died is waited for; ``tell`` hears of that.

        Gives the name of the one that has died, or held it under our name before; "" if none has.

        Raises:
            BadInput: if another holder is alive. ApiError: if the server refuses it.
        """
        while True:
            ours = self._manifest()
            found = self._api.create(ours)  # the one that is there, where there is one
            before = found["spec"].get("holderIdentity", "")
            if before in (self._holder, "") or self._is_silent(found["spec"], tell):
                break
        asked_s = time.monotonic()
        if (other := self._write(found)) != self._holder:
            self._refuse(other)
        self._renewed_s = asked_s
        return "" if found["spec"] == ours["spec"] else before

    def _is_silent(self, spec: dict[str, Any], tell: Callable[[str], None]) -> bool:
        """Whether a Lease stays the same for as long as it says; not where it is given back meanwhile.

        Raises:
            BadInput: if its holder renews it.
        """
        lasts_s = float(spec.get("leaseDurationSeconds") or self._lasts_s)
        holder, until_s = spec.get("holderIdentity"), time.monotonic() + lasts_s
        tell(f"{self._what} of {holder} has this namespace; waiting for a sign of it, {lasts_s:g} s at most")
        while time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            try:
                now = self._api.get("Lease", self._name)["spec"]
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                return False
            if now != spec:
                self._refuse(str(now.get("holderIdentity")))
        return True

    def _write(self, found: dict[str, Any]) -> str:
        """Write our name and the time over what was found, unless another holder was faster. Gives the holder."""
        version = {"resourceVersion": found["metadata"]["resourceVersion"]}
        try:
            now = self._api.patch("Lease", self._name, {"metadata": version, "spec": self._manifest()["spec"]})
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            now = self._api.get("Lease", self._name)  # ours, where the answer to our own write was lost
        return str(now["spec"].get("holderIdentity"))

    def _refuse(self, holder: str) -> None:
        raise BadInput("namespace", self._api.namespace, f"wait: {self._what} of {holder} runs there")

    def renew(self) -> str:
        """Say that the holder is alive. Why it must stop; "" if it may go on."""
        asked_s = time.monotonic()
        try:
            found = self._api.get("Lease", self._name)
            other = str(found["spec"].get("holderIdentity"))
            if other == self._holder:
                other = self._write(found)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return f"the Lease {self._name} of namespace {self._api.namespace} is gone"
            is_late = asked_s - self._renewed_s > GIVE_UP_S
            return f"the Lease {self._name} could not be renewed for {GIVE_UP_S:g} s: {error}" if is_late else ""
        if other != self._holder:
            return f"{self._what} of {other} has taken the namespace {self._api.namespace}"
        self._renewed_s = asked_s
        return ""

    def release(self) -> None:
        """Give it back, if it is ours still. Raises ApiError."""
        if self._api.get("Lease", self._name)["spec"].get("holderIdentity") == self._holder:
            self._api.delete("Lease", self._name)

    def _manifest(self) -> dict[str, Any]:
        spec = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": self._lasts_s,
            "renewTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "labels": {"app.kubernetes.io/name": "chaoskit"}},
            "spec": spec,
        }
