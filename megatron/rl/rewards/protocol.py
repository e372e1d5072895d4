"""What a scorer and its workers agree on. Messages are JSON objects, each after its length in 4 bytes."""

import json
import struct
from typing import Any

STARTUP_S = 120.0  # imports from a busy network file system take their time
_LENGTH = struct.Struct(">I")


class UnreadableResponse(Exception):
    """Raised by a reward function: the response gives no answer that can be read. It scores 0 and is counted."""


def encode(message: dict[str, Any]) -> bytes:
    """One message as bytes. ASCII escapes carry any text, also half a surrogate pair."""
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Puts messages together from bytes as they arrive, in pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds what has arrived."""
        self._bytes += data

    def pop(self) -> dict[str, Any] | None:
        """The next complete message, or None."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return json.loads(body)
