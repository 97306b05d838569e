"""A Lease of a namespace: the right of a single process at a time to run there.

A holder renews its Lease. A Lease that stays the same for its whole duration has a dead holder, and
the next process takes it. The clocks of two machines are never compared. A waiting process measures
by itself how long the Lease has not changed, and a holder how long it could not renew.

-> nightly/places.py: what a night does when it cannot have the Lease, or loses it.
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
#: Time without a renewal after which a holder must stop. :class:`faults.StopApiServer` is usually
#: shorter.
GIVE_UP_S = 90.0
#: Time without a renewal after which another process takes a Lease. By then its holder has stopped
#: and has repaired what it had broken.
LEASE_S = 300
_LOOK_S = 1.0
#: Label of the Job of a holder. Kubernetes starts the next holder of a Job when the last has ended.
_JOB = "chaoskit.dev/job"


class NamespaceLease:
    """A Lease, as a holder sees it.

    Args:
        api: client of the namespace.
        name: name of the Lease.
        holder: name of this holder, which no other process has.
        holder_kind: the kind of its holders in messages, such as ``a night``.
        job: Kubernetes Job of the holder; "" for none. A new holder of a Job does not wait for a
            dead one of the same Job.
        lasts_s: seconds without a renewal after which the holder counts as dead.

    Attributes:
        trouble: reason for which the holder must stop; "" while it may continue.
    """

    def __init__(
        self,
        api: KubernetesApi,
        name: str,
        holder: str,
        *,
        holder_kind: str,
        job: str = "",
        lasts_s: int = LEASE_S,
    ) -> None:
        self._api, self._name, self._holder_kind, self._lasts_s = api, name, holder_kind, lasts_s
        self._holder, self._job = holder, job
        self._renewed_s = 0.0
        self.trouble = ""

    def take(self, tell: Callable[[str], None]) -> str:
        """Take the Lease, and return the name of the dead holder before, or "" if there was none.

        If another holder may be dead, wait for a sign of it, and report that by ``tell``. This may
        take as long as that Lease lasts.

        Raises:
            BadInput: if another holder is alive, or was faster.
            ApiError: if the server refuses a request or does not answer.
        """
        while True:
            lease = self._api.create(self._manifest())  # an existing Lease is returned unchanged
            before = str(lease["spec"].get("holderIdentity", ""))
            is_free = before in (self._holder, "") or (
                bool(self._job) and _job_of(lease) == self._job
            )
            if is_free or self._is_silent(lease["spec"], tell):
                break
        began_s = time.monotonic()
        if (other := self._write(lease)) != self._holder:
            self._refuse(other)
        self._renewed_s = began_s
        return "" if before == self._holder else before

    def _is_silent(self, spec: dict[str, Any], tell: Callable[[str], None]) -> bool:
        """Wait, and return whether a Lease stays the same for its whole duration.

        Return False if it is released meanwhile.

        Raises:
            BadInput: if its holder renews it.
        """
        lasts_s = float(spec.get("leaseDurationSeconds") or self._lasts_s)
        holder, until_s = spec.get("holderIdentity"), time.monotonic() + lasts_s
        tell(
            f"{self._holder_kind} of {holder} holds the Lease of this namespace; "
            f"waiting for up to {lasts_s:g} s to see whether it is renewed"
        )
        while time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            try:
                current = self._api.get("Lease", self._name)["spec"]
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                return False
            if current != spec:
                self._refuse(str(current.get("holderIdentity")))
        return True

    def _write(self, lease: dict[str, Any]) -> str:
        """Write this holder's name and the time, unless another holder was faster.

        Return the holder.
        """
        manifest = self._manifest()
        metadata = {
            "resourceVersion": lease["metadata"]["resourceVersion"],
            "labels": manifest["metadata"]["labels"],
        }
        try:
            current = self._api.patch(
                "Lease", self._name, {"metadata": metadata, "spec": manifest["spec"]}
            )
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            # this holder's own if the answer to its write was lost
            current = self._api.get("Lease", self._name)
        return str(current["spec"].get("holderIdentity"))

    def _refuse(self, holder: str) -> None:
        """Raise the BadInput of a process that must wait for another holder."""
        raise BadInput(
            "namespace", self._api.namespace, f"wait: {self._holder_kind} of {holder} runs there"
        )

    @contextmanager
    def renewed(self, every_s: float = RENEW_S) -> Iterator[None]:
        """Renew the Lease again and again on a thread, inside a ``with``; see :meth:`renew`.

        An error other than an ApiError sets :attr:`trouble` at once.
        """
        over = threading.Event()

        def renew() -> None:
            while not over.wait(every_s):
                try:
                    self.renew()
                except Exception as error:  # noqa: BLE001 - else the holder would be silent
                    self.trouble = f"the Lease {self._name} cannot be renewed: {error!r}"

        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def renew(self) -> None:
        """Renew the Lease once, or set :attr:`trouble` if the holder must stop.

        No ApiError is raised: a server that does not answer may do so next time.
        """
        began_s = time.monotonic()
        try:
            lease = self._api.get("Lease", self._name)
            other = str(lease["spec"].get("holderIdentity"))
            if other == self._holder:
                other = self._write(lease)
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
            self.trouble = (
                f"{self._holder_kind} of {other} has taken the namespace {self._api.namespace}"
            )

    def release(self) -> None:
        """Delete the Lease if this holder still has it. Raises ApiError, also if it is gone."""
        if self._api.get("Lease", self._name)["spec"].get("holderIdentity") == self._holder:
            self._api.delete("Lease", self._name)

    def _manifest(self) -> dict[str, Any]:
        """Return the Lease with this holder and the present time."""
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


def _job_of(lease: dict[str, Any]) -> str:
    """Return the Job of the holder of a Lease; "" if it has none."""
    return str(lease["metadata"].get("labels", {}).get(_JOB, ""))
