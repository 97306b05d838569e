"""Connects the standard streams to those of a container: ``attach.py NAMESPACE POD CONTAINER``.

-> ``support/hand/in_pods.py`` starts it as the client of a hand.
"""

from __future__ import annotations

import os
import sys
import threading

from kubernetes import client, config
from kubernetes.stream import stream


def main() -> None:
    """Pass bytes on until either side ends."""
    namespace, pod, container = sys.argv[1:]
    config.load_kube_config(os.environ["CHAOSKIT_TEST_KUBECONFIG"])
    attach = client.CoreV1Api().connect_get_namespaced_pod_attach
    streams = {"stdin": True, "stdout": True, "stderr": False, "tty": False}
    socket = stream(attach, pod, namespace, container=container, _preload_content=False, **streams)

    def send() -> None:
        while data := os.read(0, 65536):
            socket.write_stdin(data.decode())
        socket.close()

    threading.Thread(target=send, daemon=True).start()
    while socket.is_open():
        socket.update(timeout=1)
        while socket.peek_stdout():
            os.write(1, socket.read_stdout().encode())


if __name__ == "__main__":
    main()
