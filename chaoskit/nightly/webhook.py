"""Tell a chat of a night. One that fails, or is slow, changes nothing."""

from __future__ import annotations

import json
import os
import urllib.request
from http.client import HTTPException
from pathlib import Path

from chaoskit.history.record import NightRecord
from chaoskit.nightly.outcome import night_sentence
from chaoskit.nightly.plan import Webhook

_PATIENCE_S = 10.0


def post(webhook: Webhook, night: NightRecord, before: NightRecord | None) -> str:
    """Post the result, where it is asked for; what went wrong, without the URL, or "".

    Args:
        before: the night before this one, for ``when: change``.
    """
    is_new = before is None or before.exit_code != night.exit_code
    if (webhook.when == "bad" and not night.exit_code) or (webhook.when == "change" and not is_new):
        return ""
    try:
        url = _url(webhook.url_from)
    except (OSError, ValueError) as error:
        return f"the webhook was not called: {error}"
    text = f"{night.name}: {night_sentence(night)}"
    told = {"text": text, "name": night.name, "exit_code": night.exit_code, "commit": night.commit}
    request = urllib.request.Request(
        url,
        data=json.dumps(told).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            answer.read(1)
    except (OSError, ValueError, HTTPException) as error:
        return f"the webhook has failed: {type(error).__name__}"  # its text may hold the URL
    return ""


def _url(place: str) -> str:
    kind, _, name = place.partition(":")
    found = os.environ.get(name, "") if kind == "env" else Path(name).read_text(encoding="utf-8")
    if not found.strip().startswith(("https://", "http://")):
        raise ValueError(f"{place} holds no URL")
    return found.strip()
