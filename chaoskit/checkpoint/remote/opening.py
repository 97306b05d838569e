"""Open the store of a URL: choose its class by the protocol, and the options of its client.

-> ``remote/s3.py``, ``remote/local.py`` and ``remote/store.py``: the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chaoskit.checkpoint.remote.local import LocalStore
from chaoskit.checkpoint.remote.s3 import S3Store
from chaoskit.checkpoint.remote.store import Store, Traffic
from chaoskit.errors import BadInput

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_KINDS: dict[str, type[Store]] = {
    "s3": S3Store,
    "s3a": S3Store,
    "file": LocalStore,
    "local": LocalStore,
}
_CONNECT_S = 5.0


def open_store(
    url: str, storage_options: Mapping[str, Any] | None = None, traffic: Traffic | None = None
) -> Store:
    """Return the store below a URL such as ``s3://bucket/run`` or ``file:///mnt/run``.

    The store is not contacted yet. Call this in the process that uses the store, which does not
    survive a fork.

    Args:
        url: the URL.
        storage_options: options of fsspec's file system: credentials, endpoint, and so on.
        traffic: limits of requests; None for the defaults.

    Raises:
        BadInput: if the URL is invalid, or a package that it needs is not installed.
    """
    traffic = traffic or Traffic()
    protocol = require_store("url", url)
    import fsspec

    options = _with_defaults(protocol, dict(storage_options or {}), traffic)
    try:
        fs, root = fsspec.core.url_to_fs(
            url, skip_instance_cache=True, use_listings_cache=False, **options
        )
    except (ValueError, TypeError) as error:
        raise BadInput("url", url, f"correct the URL or storage_options: {error}") from None
    return _KINDS.get(protocol, Store)(fs, root, url, traffic)


def require_store(field: str, url: str) -> str:
    """Return the protocol of ``url``, without connecting or starting a thread.

    Args:
        field: name of the user's option or argument that holds the URL, for an error.

    Raises:
        BadInput: if the URL is invalid, or a package that it needs is not installed.
    """
    protocol, separator, place = url.partition("://")
    if not separator or not place.strip("/"):
        raise BadInput(
            field, url, "write PROTOCOL://PLACE, such as s3://bucket/run or file:///mnt/run"
        )
    try:
        import fsspec

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol, "s3" if error.name == "fsspec" else "")
        raise BadInput(
            field, url, f"pip install 'chaoskit[{extra}]'" if extra else str(error)
        ) from None
    except ValueError as error:
        raise BadInput(field, url, f"use a protocol that fsspec knows: {error}") from None
    return protocol


def _with_defaults(protocol: str, options: dict[str, Any], traffic: Traffic) -> dict[str, Any]:
    """Return the options, with defaults that disable retries and checks which chaoskit does itself.

    The user's options take precedence.
    """
    if _KINDS.get(protocol) is LocalStore:
        return {"auto_mkdir": True} | options
    if _KINDS.get(protocol) is not S3Store:
        return options
    config = {
        "connect_timeout": min(_CONNECT_S, traffic.request_timeout_s),
        "read_timeout": traffic.request_timeout_s,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": max(10, traffic.parallel + 2),
        "request_checksum_calculation": "when_required",  # every body goes with its MD5
        # every chunk is checked against the manifest
        "response_checksum_validation": "when_required",
    }
    return options | {"config_kwargs": config | options.get("config_kwargs", {})}
