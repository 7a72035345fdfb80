"""The batches of an `embed` job: files and texts in, rows out."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from vlmrun.files.rows import Embedding, Failure
from vlmrun.job import Job
from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.plan import Plan
from vlmrun.models.model import Model
from vlmrun.tasks.embed import embed_images, embed_texts, unit_length
from vlmrun.tasks.preprocess import PicturePreprocessor
from vlmrun.tasks.samples import (
    Batch,
    Sample,
    batched,
    decode_options,
    failure,
    inputs_of,
    notes_of,
    overflowed,
    read_sample,
)
from vlmrun.tasks.texts import TextPreprocessor
from vlmrun.tasks.vision import squares


class Embedder:
    """Embeds a job's pictures, then its texts; every batch comes with its notes."""

    def __init__(
        self, job: Job, model: Model, plan: Plan, entry: CachedModelWithPartialLoad
    ) -> None:
        self._job = job
        self._model = model
        self._plan = plan
        self._entry = entry
        self._pictures = PicturePreprocessor(model) if job.images else None
        self._texts = TextPreprocessor(model) if job.texts else None
        self._normalize = job.output_kind == "pooled" if job.normalize is None else job.normalize

    def batches(self) -> Iterator[Batch]:
        yield from self._picture_batches()
        yield from self._text_batches()

    def _picture_batches(self) -> Iterator[Batch]:
        options = decode_options(self._job)
        numbered = list(enumerate(inputs_of(self._job)))
        for group in batched(numbered, self._plan.workload.batch_size):
            start = time.perf_counter()
            found = [read_sample(i, image, options, cut=self._cut) for i, image in group]
            samples = [item for item in found if not isinstance(item, Failure)]
            vectors = iter(self._embed_pictures(samples))
            each = (time.perf_counter() - start) * 1000 / len(group)
            rows = [
                item if isinstance(item, Failure) else self._row(next(vectors), each, item)
                for item in found
            ]
            yield batch_of(rows, notes_of(samples))

    def _cut(self, image: Image) -> Tensor:
        assert self._pictures is not None
        return self._pictures.pixels([image])

    def _embed_pictures(self, samples: Sequence[Sample[Tensor]]) -> list[Tensor]:
        if not samples:
            return []
        groups = squares(torch.cat([sample.pixels for sample in samples]))
        kind = self._job.output_kind
        return embed_images(self._entry, self._model.architecture, groups, kind)

    def _text_batches(self) -> Iterator[Batch]:
        if self._texts is None:
            return
        for group in batched(self._job.texts, self._plan.workload.batch_size):
            start = time.perf_counter()
            ids, notes = self._texts.tokens(group)
            vectors = embed_texts(self._entry, ids)
            each = (time.perf_counter() - start) * 1000 / len(group)
            rows = [self._row(v, each, text) for v, text in zip(vectors, group, strict=True)]
            yield batch_of(rows, notes)

    def _row(self, vector: Tensor, ms: float, source: Sample[Tensor] | str) -> Embedding | Failure:
        path = source.path if isinstance(source, Sample) else None
        text = source if isinstance(source, str) else None
        if self._normalize:
            vector = unit_length(vector)
        if not torch.isfinite(vector).all():
            return failure(overflowed(), path=path, text=text)
        return Embedding(
            path=path,
            text=text,
            vector=np.ascontiguousarray(vector.numpy()),
            output_kind=self._job.output_kind,
            model=self._model.source.name,
            revision=self._model.source.revision,
            dtype=self._plan.storage.dtype,
            ms=ms,
            sha256=source.sha256 if isinstance(source, Sample) else None,
        )


def batch_of(rows: list[Embedding | Failure], notes: Sequence[str]) -> Batch:
    failed = sum(isinstance(row, Failure) for row in rows)
    return Batch(tuple(rows), len(rows) - failed, failed, tuple(notes))
