"""A disk that is full, and pictures that cannot be decoded."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vlmrun.errors import ImageError
from vlmrun.files.images import DecodeOptions, decode_image, read_size
from vlmrun.files.inputs import ImageInput


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file grows beyond so many bytes. It ends with the `with` block, within the test: pytest
    may be writing to a file itself."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def both_fail(image: ImageInput, words: str, options: DecodeOptions | None = None) -> ImageError:
    """The error of decoding, after checking that reading the size fails the same way."""
    options = options or DecodeOptions()
    with pytest.raises(ImageError, match=words) as by_size:
        read_size(image, options=options)
    with pytest.raises(ImageError, match=words) as by_decoding:
        decode_image(image, options=options)
    error = by_decoding.value
    assert error.exit_code == 1
    assert error.message == by_size.value.message
    assert image.path not in error.message, "the row carries the path"
    return error
