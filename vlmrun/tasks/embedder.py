"""The batches of an `embed` job: files and texts in, rows out."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vlmrun.files.inputs import ImageInput
from vlmrun.files.rows import Embedding, Failure
from vlmrun.job import Job
from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.plan import Plan
from vlmrun.memory.workload import view_of
from vlmrun.models.model import Model
from vlmrun.tasks.batches import Finished, Reading, batch_of, overlapped
from vlmrun.tasks.embed import embed_images, embed_texts, unit_length
from vlmrun.tasks.overflow import first_overflow
from vlmrun.tasks.patches import picture_cutter
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
from vlmrun.tasks.scores import Scorer, make_scorer
from vlmrun.tasks.texts import TextPreprocessor
from vlmrun.tasks.vision import Group, joined


class Embedder:
    """Embeds a job's pictures, then its texts; every batch comes with its notes."""

    def __init__(
        self, job: Job, model: Model, plan: Plan, entry: CachedModelWithPartialLoad
    ) -> None:
        self._job = job
        self._options = decode_options(job)
        self._model = model
        self._plan = plan
        self._entry = entry
        self._cut = picture_cutter(model, view_of(model, job)) if job.images else None
        self._texts = TextPreprocessor(model) if job.texts else None
        self._scorer: Scorer | None = None
        self._normalize = job.output_kind == "pooled" if job.normalize is None else job.normalize

    def batches(self) -> Iterator[Batch]:
        if not self._job.scores:
            yield from self._picture_batches()
            yield from self._text_batches()
            return
        said = list(self._text_batches())  # pictures are scored against them, and written first
        rows = [row for batch in said for row in batch.rows if isinstance(row, Embedding)]
        if rows:
            texts = [row.text or "" for row in rows]
            vectors = [torch.from_numpy(row.vector) for row in rows]
            self._scorer = make_scorer(self._model, self._entry, texts, vectors)
        yield from self._picture_batches()
        yield from said

    def rest(self) -> Batch:
        """Nothing waits: vectors are written in the order that they are made in."""
        return batch_of([])

    def _picture_batches(self) -> Iterator[Batch]:
        numbered = list(enumerate(inputs_of(self._job)))
        size = self._plan.workload.batch_size
        count = -(-len(numbered) // size)
        yield from overlapped(batched(numbered, size), self._read, self._finish, count=count)

    def _read(self, index: int, image: ImageInput) -> Sample[Group] | Failure:
        assert self._cut is not None
        return read_sample(index, image, self._options, cut=self._cut)

    def _finish(self, reading: Reading[Group]) -> Batch:
        samples = [item for item in reading.found if not isinstance(item, Failure)]
        vectors = iter(self._embed_pictures(samples))
        each = reading.ms_each()
        return batch_of(
            [
                Finished((item,))
                if isinstance(item, Failure)
                else Finished((self._row(next(vectors), each, item),), notes_of([item]))
                for item in reading.found
            ]
        )

    def _embed_pictures(self, samples: Sequence[Sample[Group]]) -> list[Tensor]:
        """A vector of every picture; those of one file's bytes pass the tower once, and those of
        one shape together."""
        if not samples:
            return []
        distinct = {sample.sha256: sample.pixels for sample in samples}
        ranked = sorted(distinct, key=lambda sha256: distinct[sha256].inputs[0].shape)
        groups = joined([distinct[sha256] for sha256 in ranked])
        architecture = self._model.architecture
        vectors = embed_images(self._entry, architecture, groups, self._job.output_kind)
        of_file = dict(zip(ranked, vectors, strict=True))
        return [of_file[sample.sha256] for sample in samples]

    def _text_batches(self) -> Iterator[Batch]:
        if self._texts is None:
            return
        for group in batched(self._job.texts, self._plan.workload.batch_size):
            start = time.perf_counter()
            ids, notes = self._texts.tokens(group)
            vectors = embed_texts(self._entry, ids)
            each = (time.perf_counter() - start) * 1000 / len(group)
            rows = [self._row(v, each, text) for v, text in zip(vectors, group, strict=True)]
            yield replace(batch_of([Finished((row,)) for row in rows]), notes=notes)

    def _row(self, vector: Tensor, ms: float, source: Sample[Group] | str) -> Embedding | Failure:
        path = source.path if isinstance(source, Sample) else None
        text = source if isinstance(source, str) else None
        scores = self._scorer.scores(vector) if self._scorer is not None and path else ()
        if self._normalize:
            vector = unit_length(vector)
        if not torch.isfinite(vector).all():
            return failure(overflowed(self._overflow(source)), path=path, text=text)
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
            scores=scores,
        )

    def _overflow(self, source: Sample[Group] | str) -> str | None:
        """The layer that overflowed for an input."""
        if isinstance(source, Sample):
            again: Callable[[], object] = partial(self._embed_pictures, [source])
            return first_overflow(self._entry, self._model, "vision", again)
        assert self._texts is not None
        again = partial(embed_texts, self._entry, self._texts.tokens([source])[0])
        return first_overflow(self._entry, self._model, "text", again)
