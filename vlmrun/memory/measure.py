"""The highest memory a process reached, by kind."""

import threading

from vlmrun.memory.budget import process_memory

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
