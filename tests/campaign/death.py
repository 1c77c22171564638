"""SIGKILL from the kernel's own timer: at a moment to the microsecond, whatever the process is
doing."""

import ctypes
import signal

CLOCK_MONOTONIC, SIGEV_SIGNAL = 1, 0


class _Event(ctypes.Structure):
    """struct sigevent, 64 bytes."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("how", ctypes.c_int),
        ("_", ctypes.c_char * 48),
    ]


class _Times(ctypes.Structure):
    """struct itimerspec: repeat after, first after; seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


def kill_after(seconds: float) -> None:
    """Kill this process so much later; nothing of it runs any more then."""
    libc = ctypes.CDLL(None, use_errno=True)
    event, timer = _Event(None, signal.SIGKILL, SIGEV_SIGNAL, b""), ctypes.c_void_p()
    whole = int(seconds)
    times = _Times(0, 0, whole, max(1, int((seconds - whole) * 1e9)))
    for failed in (
        libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)),
        libc.timer_settime(timer, 0, ctypes.byref(times), None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "no timer")
