"""Messages: one JSON object, plus raw bytes in frames of their own. Nothing is ever unpickled here."""

from __future__ import annotations

import json
from typing import Any


class BadMessage(ValueError):
    """Frames that are no message of ours."""


def encode(message: dict[str, Any]) -> list[bytes]:
    """Frames for `message`; top-level values of type bytes travel as frames of their own."""
    blobs = {key: value for key, value in message.items() if isinstance(value, bytes)}
    if not blobs:
        return [json.dumps(message).encode()]
    head = {key: value for key, value in message.items() if key not in blobs}
    head["_frames"] = list(blobs)
    return [json.dumps(head).encode(), *blobs.values()]


def decode(frames: list[bytes]) -> dict[str, Any]:
    """The message that `encode` made; raises `BadMessage` on anything else."""
    try:
        message = json.loads(frames[0])
        names = message.pop("_frames", [])
        if len(names) != len(frames) - 1:
            raise BadMessage(f"{len(frames) - 1} binary frames came, {len(names)} were announced")
        message.update(zip(names, (bytes(f) for f in frames[1:])))
        return message
    except BadMessage:
        raise
    except (ValueError, AttributeError, TypeError, IndexError, RecursionError) as error:
        raise BadMessage(f"not a message: {error}") from error
