"""Several models in one process, within one budget."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from vlmrun.errors import OutOfBudget
from vlmrun.memory.budget import format_bytes
from vlmrun.memory.cached_model import CachedModel

Entry = TypeVar("Entry", bound=CachedModel)


@dataclass(slots=True)
class Record:
    entry: CachedModel
    locks: int = 0

    @property
    def taken_bytes(self) -> int:
        """What the entry holds or, while it is in use, may come to hold."""
        held = self.entry.resident_bytes
        return max(held, self.entry.wanted_bytes) if self.locks else held


class ModelCache:
    """Entries by key, least recently used first. An entry in use is never touched; others
    give weights back when a new one needs the room. Closable."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._records: dict[str, Record] = {}

    def __enter__(self) -> "ModelCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def resident_bytes(self) -> int:
        return sum(record.entry.resident_bytes for record in self._records.values())

    @property
    def _taken_bytes(self) -> int:
        return sum(record.taken_bytes for record in self._records.values())

    @contextmanager
    def use(self, key: str, make: Callable[[], Entry], *, nbytes: int) -> Iterator[Entry]:
        """Lend the entry under `key`, made first where it is not there yet.

        Getting and locking are one step, so that nothing can evict an entry in between.
        `nbytes` is what the resident weights of one that is made will take at most.

        Raises:
            OutOfBudget: entries in use leave no such room.
        """
        record = self._lock(key, make, nbytes)
        try:
            yield record.entry  # type: ignore[misc]
        finally:
            record.locks -= 1

    def _lock(self, key: str, make: Callable[[], CachedModel], nbytes: int) -> Record:
        """The record under `key`, with room for all that its entry keeps while in use."""
        record = self._records.pop(key, None)
        try:
            if record is None:
                self.make_room(nbytes)
                record = Record(make())
            elif not record.locks:
                self.make_room(record.entry.wanted_bytes)
            record.locks += 1
            return record
        finally:
            if record is not None:
                self._records[key] = record  # most recently used last

    def make_room(self, nbytes: int) -> None:
        """Have entries that are not in use give weights back until `nbytes` are free.

        Raises:
            OutOfBudget: they cannot.
        """
        for record in self._records.values():
            excess = self._taken_bytes + nbytes - self.budget_bytes
            if excess > 0 and not record.locks:
                record.entry.shrink(excess)
        excess = self._taken_bytes + nbytes - self.budget_bytes
        if excess > 0:
            raise OutOfBudget(
                f"models in use leave {format_bytes(max(0, nbytes - excess))}, "
                f"{format_bytes(nbytes)} are needed",
                "give more memory, or use the models one after the other",
            )

    def close(self) -> None:
        for record in self._records.values():
            record.entry.close()
        self._records.clear()
