"""A timer of the kernel that ends this process, whatever it is doing.

No thread of Python can do that while another one keeps the interpreter lock in a native call, or while the whole
process is stopped: a rank whose supervisor is gone would stay for ever. The kernel's timers need neither.
They are not inherited over a fork.
"""

from __future__ import annotations

import ctypes
import signal
import time


class _Event(ctypes.Structure):
    """`struct sigevent`, 64 bytes on Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_char * 48),
    )  # fmt: skip


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Times(ctypes.Structure):
    """`struct itimerspec`: how often again, and when first."""

    _fields_ = (("interval", _Time), ("value", _Time))


class DeadManTimer:
    """Ends this process with SIGKILL unless it is set anew in time. Does nothing where the system has no such timer."""

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "timer_create"):  # macOS
            return
        event, timer = _Event(None, signal.SIGKILL, 0), ctypes.c_void_p()
        if self._libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
            self._timer = timer

    @property
    def exists(self) -> bool:
        return self._timer is not None

    def set(self, seconds: float) -> None:
        """End the process in `seconds`, counted anew from now; 0: never."""
        if self._timer is not None:
            first = _Time(int(seconds), int(seconds % 1 * 1e9))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(_Times(_Time(0, 0), first)), None)
