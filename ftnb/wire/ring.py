"""A ring of records in shared memory: one process writes, one reads, nobody is woken.

A rank reports twice in each step. Over a socket that costs two thread switches and some encryption per report,
on cores that are busy training: 4 to 7 % of the step rate were measured. Here it costs a copy, and what a rank
wrote before it was killed is still there to be read.

The reader frees records by `free`, once what they say is in the files of the run: so a successor of a supervisor
that was killed reads again what had not been written down.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

# As much as a rank that does 300 small steps a second reports in a minute: so long it trains without a supervisor.
DATA_BYTES = 4 << 20
_HEADER_BYTES = 16  # two 64-bit counters that only grow: bytes written, bytes freed
_LENGTH = struct.Struct("=I")


class _Ring:
    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _HEADER_BYTES + DATA_BYTES)
        # Stored as one aligned machine word, so that the other side never sees half a counter.
        self._counters = memoryview(self._map)[:_HEADER_BYTES].cast("Q")

    def close(self) -> None:
        self._counters.release()
        self._map.close()


class RingWriter(_Ring):
    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            super().__init__(fd)
        finally:
            os.close(fd)

    def write(self, record: bytes) -> None:
        """Append a record; waits while the ring is full (the reader has stopped)."""
        size = _LENGTH.size + len(record)
        if size > DATA_BYTES:
            raise ValueError(f"a record of {len(record)} bytes does not fit into the ring")
        written = self._counters[0]
        while written - self._counters[1] + size > DATA_BYTES:
            time.sleep(0.002)
        self._put(written, _LENGTH.pack(len(record)) + record)
        self._counters[0] = written + size

    def _put(self, position: int, data: bytes) -> None:
        start = position % DATA_BYTES
        first = min(len(data), DATA_BYTES - start)
        self._map[_HEADER_BYTES + start : _HEADER_BYTES + start + first] = data[:first]
        if first < len(data):
            self._map[_HEADER_BYTES : _HEADER_BYTES + len(data) - first] = data[first:]


def _allocate(fd: int, path: Path) -> None:
    """All of it at once: to write into a hole of a file on a full disk ends a process (SIGBUS)."""
    try:
        os.posix_fallocate(fd, 0, _HEADER_BYTES + DATA_BYTES)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None


class RingReader(_Ring):
    """Creates the file (mode 0600), or opens it again; the writer opens it by its path."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        if create:
            path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                _allocate(fd, path)
            super().__init__(fd)
        finally:
            os.close(fd)
        self._position = self._counters[1]

    def read(self) -> Iterator[tuple[int, bytes]]:
        """All records that are there now, each once in the life of this reader, with the position of their end."""
        while self._position != self._counters[0]:
            (length,) = _LENGTH.unpack(self._get(self._position, _LENGTH.size))
            record = self._get(self._position + _LENGTH.size, length)
            self._position += _LENGTH.size + length
            yield self._position, record

    def free(self, position: int) -> None:
        """What ends at or before `position` is done with: its room may be used again."""
        self._counters[1] = max(self._counters[1], position)

    @property
    def is_empty(self) -> bool:
        """Everything that was written is freed."""
        return self._counters[0] == self._counters[1]

    def _get(self, position: int, size: int) -> bytes:
        start = position % DATA_BYTES
        first = self._map[_HEADER_BYTES + start : _HEADER_BYTES + min(start + size, DATA_BYTES)]
        return first + self._map[_HEADER_BYTES : _HEADER_BYTES + size - len(first)]

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        super().close()
