"""The highest memory a process reached, by kind, and what else is measured of a run."""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmrun.memory.budget import process_memory

if TYPE_CHECKING:
    from vlmrun.memory.cached_model import CachedModel

INTERVAL_SECONDS = 0.01


class PeakMemory:
    """Samples this process's resident memory every 10 ms while it is open, and once at the end;
    `peak` is the sample whose kinds add up to the most."""

    def __init__(self) -> None:
        self.peak = process_memory()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self._look()

    def _look(self) -> None:
        sample = process_memory()
        if sample.total_bytes > self.peak.total_bytes:
            self.peak = sample


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run took, beside what its plan foretold."""

    load_seconds: float
    run_seconds: float
    peak_anon_bytes: int
    peak_file_bytes: int
    peak_shmem_bytes: int
    peak_ram_bytes: int  # the highest sum of the three at one moment
    peak_vram_bytes: int
    disk_bytes_read: int
    tokens: int


def read_measures(
    peak: PeakMemory, entry: "CachedModel", load_seconds: float, run_seconds: float, tokens: int
) -> Measured:
    return Measured(
        load_seconds=load_seconds,
        run_seconds=run_seconds,
        peak_anon_bytes=peak.peak.anon_bytes,
        peak_file_bytes=peak.peak.file_bytes,
        peak_shmem_bytes=peak.peak.shmem_bytes,
        peak_ram_bytes=peak.peak.total_bytes,
        peak_vram_bytes=entry.peak_vram_bytes,
        disk_bytes_read=entry.bytes_read,
        tokens=tokens,
    )
