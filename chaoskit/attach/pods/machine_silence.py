"""The silence of a machine with pods of a job that already runs, as a proof of its loss.

No supervisor of ours is on the machine, and the API server notices the loss much later. But the
API server passes each request for a log on to the kubelet of the machine, which must answer it.

-> ``machine_pods.py``: the fault that takes the machine away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from chaoskit.substrate.kubernetes.api.requests import ApiError, KubernetesApi

#: Seconds within which a kubelet answers, else the next request is made.
ANSWER_S = 1.0
#: A machine whose kubelet has answered nothing for this long is silent.
SILENT_S = 2.0
_ASK_AGAIN_S = 0.2
#: Begin of the message of an API server that has not reached a kubelet.
_NOT_REACHED = 'Get "http'


def is_silence_of_kubelet(error: ApiError) -> bool:
    """Return whether a failed request for a log shows that no kubelet has answered.

    The API server may not have answered in time either: it waits for the kubelet.
    """
    return error.is_silence or (error.status >= 500 and str(error).startswith(_NOT_REACHED))


class MachineSilence:
    """Watch of a machine's kubelet, by a thread from ``start`` to ``close``.

    Args:
        api: client of the namespace.
        containers: names of pods on the machine, each with the name of its container.
    """

    def __init__(self, api: KubernetesApi, containers: Sequence[tuple[str, str]]) -> None:
        self._api, self._containers = api, containers
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_silent = False

    def start(self) -> None:
        """Start to ask the kubelet. A second call changes nothing."""
        with self._lock:
            if self._thread is None and not self._is_over.is_set():
                self._thread = threading.Thread(
                    target=self._ask, name="ck-machine-silence", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End the questions. The thread ends with its present question."""
        self._is_over.set()

    def _ask(self) -> None:
        """Ask the kubelet until it has not answered for a while. This runs in a thread."""
        answered_s = time.monotonic()
        while not self.is_silent and not self._is_over.wait(_ASK_AGAIN_S):
            if not self._asks_in_vain():
                answered_s = time.monotonic()
            self.is_silent = time.monotonic() > answered_s + SILENT_S

    def _asks_in_vain(self) -> bool:
        """Return whether the kubelet does not answer, although the API server does.

        A refusal by the API server itself, such as of a pod that is gone, shows nothing.
        """
        is_unanswered = False
        for pod, container in self._containers:
            try:
                self._api.ask_kubelet(pod, container, ANSWER_S)
            except ApiError as error:
                if not is_silence_of_kubelet(error):
                    continue
                is_unanswered = True
                break  # the other pods have the same kubelet
            return False
        return is_unanswered and self._api.answers(ANSWER_S)
