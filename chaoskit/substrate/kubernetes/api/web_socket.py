"""WebSockets to the API server, with a time limit of their own for the connection.

-> kubernetes/api/requests.py makes the errors of one.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any


def open_web_socket(
    configuration: Any, url: str, headers: Mapping[str, str], limit_s: float
) -> Any:
    """Return an open WebSocket, on which each later wait has the same time limit.

    Args:
        configuration: configuration of the client package: certificates and proxies.
        url: URL of the resource, with ``https`` or ``http``.
        headers: ``authorization`` and ``sec-websocket-protocol``.
        limit_s: seconds for the connection, and for each answer of the handshake.

    Raises:
        WebSocketException, OSError: if the server refuses it or does not answer in time.
    """
    from kubernetes.stream.ws_client import websocket_proxycare
    from websocket import WebSocket

    options: dict[str, Any] = {"header": [f"{name}: {text}" for name, text in headers.items()]}
    if configuration.proxy or configuration.proxy_headers:
        options = websocket_proxycare(options, configuration, url, dict(headers))
    web_socket: Any = WebSocket(sslopt=_certificates(configuration), enable_multithread=True)
    web_socket.connect("ws" + url.removeprefix("http"), timeout=limit_s, **options)
    return web_socket


def _certificates(configuration: Any) -> dict[str, Any]:
    """Return the options of TLS: what the server must prove, and what this client proves."""
    options: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE}
    if configuration.verify_ssl:
        options = {"cert_reqs": ssl.CERT_REQUIRED}
        if configuration.ssl_ca_cert:
            options["ca_certs"] = configuration.ssl_ca_cert
        if configuration.assert_hostname is not None:
            options["check_hostname"] = configuration.assert_hostname
    names = {
        "certfile": configuration.cert_file,
        "keyfile": configuration.key_file,
        "server_hostname": configuration.tls_server_name,
    }
    return options | {name: value for name, value in names.items() if value}
