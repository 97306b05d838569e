"""A Lease of a namespace: what one process at a time may do there.

A holder renews its Lease. One that has died does not, so a Lease that stays the same for as long as it says is taken by
the next. No clocks of two machines are compared: a process that waits counts by itself how long nothing has changed,
and a holder how long it could not renew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from chaoskit.errors import BadInput
from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

RENEW_S = 10.0
#: A holder that could not renew for so long must stop: more than :class:`faults.StopApiServer` usually lasts.
GIVE_UP_S = 90.0
#: A Lease that has not been renewed for so long is taken by another one. By then its holder has stopped, and has put
#: back what it had broken.
LEASE_S = 300
_LOOK_S = 1.0
#: A label: holders of one Job follow each other, and Kubernetes makes the next when the last has ended.
_JOB = "chaoskit.dev/job"


class NamespaceLease:
    """One Lease, as a holder sees it.

    Args:
        holder: no other process has this name. job: of Kubernetes, to which it belongs; "" for none.
        what: it is for, in the words of a refusal: ``a night``.
        lasts_s: without being renewed. A holder that dies is waited for that long, but by another one of its Job.

    Attributes:
        trouble: why the holder must stop; "" while it may go on.
    """

    def __init__(
        self,
        api: KubernetesApi,
        name: str,
        holder: str,
        *,
        what: str,
        job: str = "",
        lasts_s: int = LEASE_S,
    ) -> None:
        self._api, self._name, self._what, self._lasts_s = api, name, what, lasts_s
        self._holder, self._job = holder, job
        self._renewed_s = 0.0
        self.trouble = ""

    def take(self, tell: Callable[[str], None]) -> str:
        """Hold it. A holder that may have died is waited for; ``tell`` hears of that.

        Gives the name of the one that has died; "" if none has.

        Raises:
            BadInput: if another holder is alive. ApiError: if the server refuses it.
        """
        while True:
            found = self._api.create(self._manifest())  # the one that is there, where there is one
            before = str(found["spec"].get("holderIdentity", ""))
            is_free = before in (self._holder, "") or (
                bool(self._job) and _job_of(found) == self._job
            )
            if is_free or self._is_silent(found["spec"], tell):
                break
        began_s = time.monotonic()
        if (other := self._write(found)) != self._holder:
            self._refuse(other)
        self._renewed_s = began_s
        return "" if before == self._holder else before

    def _is_silent(self, spec: dict[str, Any], tell: Callable[[str], None]) -> bool:
        """Whether a Lease stays the same for as long as it says; not where it is given back meanwhile.

        Raises:
            BadInput: if its holder renews it.
        """
        lasts_s = float(spec.get("leaseDurationSeconds") or self._lasts_s)
        holder, until_s = spec.get("holderIdentity"), time.monotonic() + lasts_s
        tell(
            f"{self._what} of {holder} has this namespace; waiting for a sign of it, {lasts_s:g} s at most"
        )
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
        ours = self._manifest()
        metadata = {
            "resourceVersion": found["metadata"]["resourceVersion"],
            "labels": ours["metadata"]["labels"],
        }
        try:
            now = self._api.patch("Lease", self._name, {"metadata": metadata, "spec": ours["spec"]})
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            now = self._api.get(
                "Lease", self._name
            )  # ours, where the answer to our own write was lost
        return str(now["spec"].get("holderIdentity"))

    def _refuse(self, holder: str) -> None:
        raise BadInput(
            "namespace", self._api.namespace, f"wait: {self._what} of {holder} runs there"
        )

    @contextmanager
    def renewed(self, every_s: float = RENEW_S) -> Iterator[None]:
        """Renew it as long as a ``with`` lasts, on a thread: :attr:`trouble` says when that has failed."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(every_s):
                try:
                    self.renew()
                except Exception as error:  # noqa: BLE001 - a thread that ends would be a holder that is silent
                    self.trouble = f"the Lease {self._name} cannot be renewed: {error!r}"

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def renew(self) -> None:
        """Say that the holder is alive, or note why it must stop."""
        began_s = time.monotonic()
        try:
            found = self._api.get("Lease", self._name)
            other = str(found["spec"].get("holderIdentity"))
            if other == self._holder:
                other = self._write(found)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                self.trouble = f"the Lease {self._name} of namespace {self._api.namespace} is gone"
            elif time.monotonic() - self._renewed_s > GIVE_UP_S:
                self.trouble = (
                    f"the Lease {self._name} could not be renewed for {GIVE_UP_S:g} s: {error}"
                )
            return
        if other == self._holder:
            self._renewed_s = began_s
        else:
            self.trouble = f"{self._what} of {other} has taken the namespace {self._api.namespace}"

    def release(self) -> None:
        """Give it back, if it is ours still. Raises ApiError."""
        if self._api.get("Lease", self._name)["spec"].get("holderIdentity") == self._holder:
            self._api.delete("Lease", self._name)

    def _manifest(self) -> dict[str, Any]:
        labels = {"app.kubernetes.io/name": "chaoskit", _JOB: self._job}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "labels": labels},
            "spec": {
                "holderIdentity": self._holder,
                "leaseDurationSeconds": self._lasts_s,
                "renewTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
            },
        }


def _job_of(found: dict[str, Any]) -> str:
    return str(found["metadata"].get("labels", {}).get(_JOB, ""))
