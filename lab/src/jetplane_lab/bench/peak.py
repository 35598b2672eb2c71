"""Peak memory of a call above what was held before it.

On CUDA torch's allocator knows it exactly, and JAX's compiler says it. On the CPU it is the peak of the
resident memory, which is reset before each call (Linux). That is exact to some 0.2 MiB if freed memory goes back to the
system at once, so a process that measures memory runs with :data:`ENVIRONMENT`; it is not the process that measures
time, which these settings would slow down. Torch's own allocations are counted as well, for comparison.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["ENVIRONMENT", "CudaPeak", "limit", "resident_peak", "tensor_peak"]

# one arena, and every block of 64 KiB or more mapped by itself and unmapped when freed
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
_NO_HUGE_PAGES = 41  # PR_SET_THP_DISABLE: huge pages round what is resident up to 2 MiB
_STATUS = Path("/proc/self/status")
_CALLS = 5


def resident_peak(call: Callable[[], Any], wait: Callable[[Any], None]) -> int:
    """The median over some calls of the peak resident memory above what was there before the call, in bytes."""
    libc = ctypes.CDLL(None)
    libc.prctl(_NO_HUGE_PAGES, 1, 0, 0, 0)
    for _ in range(2):  # what is loaded or kept from the first calls on belongs to what was there before
        wait(call())
    peaks = []
    for _ in range(_CALLS):
        gc.collect()
        libc.malloc_trim(0)
        _reset()
        before = _field("VmRSS")
        wait(call())
        peaks.append(_field("VmHWM") - before)
    return int(statistics.median(peaks))


def _reset() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise RuntimeError(f"the peak of resident memory cannot be reset here ({error}); expected Linux.") from error


def _field(name: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def tensor_peak(call: Callable[[], Any]) -> int:
    """The peak of what torch's CPU allocator handed out during a call and had not got back, in bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class CudaPeak:
    """The peak of torch's CUDA allocator above what it held when this was made, in bytes.

    It is made before a system is prepared and read after some calls: what a CUDA graph runs in is allocated while it is
    recorded, and is not seen by the allocator when it is replayed.
    """

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def read(self) -> int:
        """The peak until now."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self._before


def limit(share: float = 0.9) -> None:
    """Let allocations beyond a share of the free memory fail in this process, before the system ends others for it."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    if info.exists():
        lines = (line.split() for line in info.read_text(encoding="ascii").splitlines())
        free = next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), free)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = int(share * free)
    resource.setrlimit(resource.RLIMIT_DATA, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
