"""Picture files to pixels, one at a time; a bad one never stops the others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from vlmrun.errors import ImageError, NotFinite, VlmrunError
from vlmrun.files.images import DecodeOptions, decode_image
from vlmrun.files.inputs import ImageInput
from vlmrun.files.rows import Failure, Row
from vlmrun.job import Job

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample(Generic[T]):
    """One picture of the job; `index` is its place in the input order, `pixels` what its task
    made of it. The decoded picture itself is gone: a batch of large ones would fill memory."""

    index: int
    path: str
    sha256: str
    notes: tuple[str, ...]
    pixels: T


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch came to: its rows in input order, and how many inputs are done or failed."""

    rows: tuple[Row, ...]
    done: int
    failed: int
    notes: tuple[str, ...] = ()


def batched(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Groups of at most `size`, in order."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def inputs_of(job: Job) -> list[ImageInput]:
    return [ImageInput(path, job.stdin_image if path == "-" else None) for path in job.images]


def decode_options(job: Job) -> DecodeOptions:
    return DecodeOptions(background=job.background, max_pixels=job.max_pixels, frame=job.frame)


def read_sample(
    index: int, image: ImageInput, options: DecodeOptions, *, cut: Callable[["Image"], T]
) -> Sample[T] | Failure:
    """Decode one picture and cut it into what the task takes."""
    try:
        decoded = decode_image(image, options=options)
        return Sample(index, image.path, decoded.sha256, decoded.notes, cut(decoded.image))
    except ImageError as error:
        return failure(error, path=image.path)


def overflowed(layer: str | None = None) -> NotFinite:
    """The error of an input whose result holds infinities or no numbers; `layer` is the first
    that gave them, where that is known."""
    where = "the model's output" if layer is None else f"the output of {layer}"
    return NotFinite(
        f"{where} is not finite: the arithmetic overflowed; try --compute-dtype float32"
    )


def failure(error: VlmrunError, *, path: str | None = None, text: str | None = None) -> Failure:
    """The row that says why an input has no result."""
    return Failure(path, text, type(error).__name__, error.message)


def notes_of(samples: Sequence[Sample[T]]) -> tuple[str, ...]:
    """What the user should know of how pictures were decoded."""
    return tuple(f"{s.path}: {note}" for s in samples for note in s.notes)
