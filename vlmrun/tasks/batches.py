"""Which pictures run together, the next batch read while one runs, and rows in input order."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Generic, TypeVar

from vlmrun.files.inputs import ImageInput
from vlmrun.files.rows import Failure, Row
from vlmrun.nn.parallel import check_same
from vlmrun.tasks.samples import Batch, Sample, batched

T = TypeVar("T")
R = TypeVar("R")
Numbered = tuple[int, ImageInput]  # a picture and its place in the input order

# Batches whose pictures are sorted together. Of OneVision's web pictures in batches of 8, padding
# adds 60 % unsorted, 17 % in four batches and 9 % in eight; but rows wait for those before them,
# and a run that is stopped makes again what waits: no more than three batches of four.
WINDOW = 4


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A batch's pictures as they were read; `places` in the input order, `start` when the run
    began to wait for them."""

    places: tuple[int, ...]
    found: Sequence[Sample[T] | Failure]
    start: float

    def ms_each(self) -> float:
        """Each picture's share of the time that the batch took of the run, in milliseconds: what
        was read while the batch before was running has cost it nothing."""
        return (time.perf_counter() - self.start) * 1000 / len(self.found)


@dataclass(frozen=True, slots=True)
class Finished:
    """The rows of one picture or text, and what the user should know of how it was read."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def alike(
    numbered: Sequence[Numbered], size: int, cost: Callable[[ImageInput], int]
) -> Iterator[list[Numbered]]:
    """Batches of pictures that cost alike: padding runs as if it were tokens. Sorted within a
    window; the batch of the first picture that is left comes first, so that rows wait least."""
    for window in batched(numbered, size * WINDOW):
        costs = {place: cost(image) for place, image in window} if len(window) > size else {}
        ranked = sorted(window, key=lambda each: costs.get(each[0], 0))
        groups = [sorted(group, key=place_of) for group in batched(ranked, size)]
        yield from sorted(groups, key=lambda group: place_of(group[0]))


def place_of(numbered: Numbered) -> int:
    return numbered[0]


def overlapped(
    groups: Iterator[list[Numbered]],
    read: Callable[[int, ImageInput], Sample[T] | Failure],
    run: Callable[[Reading[T]], R],
    *,
    count: int,
) -> Iterator[R]:
    """What `run` makes of each of the `count` groups. While it does, one thread reads the next
    group, and no further one before this one's pixels are gone. A single group has no thread.

    Pictures that are read must not touch torch's pool of threads, nor a tokenizer: the thread
    that runs the model uses both. Where several processes share it, they must have read the same.

    Raises:
        ImageError: they have not.
    """
    stopped = Event()

    def read_group() -> tuple[tuple[int, ...], list[Sample[T] | Failure]]:
        group = next(groups)
        found = [read(*each) for each in group if not stopped.is_set()]
        return tuple(map(place_of, group)), found

    with ThreadPoolExecutor(1, "vlmrun-pictures") as thread:
        try:
            coming: Future[tuple[tuple[int, ...], list[Sample[T] | Failure]]] | None = None
            for left in reversed(range(count)):
                start = time.perf_counter()
                places, found = read_group() if coming is None else coming.result()
                # the pixels of the group before are gone now, so there is room for the next
                coming = thread.submit(read_group) if left else None
                check_same([x.message if isinstance(x, Failure) else x.sha256 for x in found])
                yield run(Reading(places, found, start))
        finally:
            stopped.set()  # the thread ends after the picture it has in hand


class InTurn:
    """Rows in input order: a picture's wait until those of all before it are there."""

    def __init__(self) -> None:
        self._waiting: dict[int, Finished] = {}
        self._place = 0

    def take(self, group: Sequence[tuple[int, Finished]]) -> Batch:
        """What can be written now that a group is finished."""
        self._waiting.update(group)
        turn = []
        while self._place in self._waiting:
            turn.append(self._waiting.pop(self._place))
            self._place += 1
        return batch_of(turn)

    def rest(self) -> Batch:
        """What waits, for a run that ends here: in input order, without those before them."""
        waiting, self._waiting = self._waiting, {}
        return batch_of([waiting[place] for place in sorted(waiting)])


def batch_of(inputs: Sequence[Finished]) -> Batch:
    failed = sum(any(isinstance(row, Failure) for row in each.rows) for each in inputs)
    return Batch(
        rows=tuple(row for each in inputs for row in each.rows),
        done=len(inputs) - failed,
        failed=failed,
        notes=tuple(note for each in inputs for note in each.notes),
    )
