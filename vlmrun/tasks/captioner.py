"""The batches of a `caption` job: files in, one row per picture and prompt out."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL.Image import Image

from vlmrun.errors import ImageError, NotFinite
from vlmrun.files.rows import Caption, Failure
from vlmrun.job import Job, Prompt
from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.plan import Plan
from vlmrun.memory.workload import view_of
from vlmrun.models.model import Model
from vlmrun.tasks.caption import Pictures, encode_pictures
from vlmrun.tasks.chat import Chat
from vlmrun.tasks.decode import Decoded, DecodeRow, decode
from vlmrun.tasks.overflow import overflow_of_answer
from vlmrun.tasks.prefix import Prefix
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
    read_samples,
)


@dataclass(frozen=True, slots=True)
class Question:
    """A picture's crops, and for every prompt the token ids that ask about it."""

    pictures: Pictures
    input_ids: tuple[tuple[int, ...], ...]


Asked = Sample[Question]


class Captioner:
    """Captions a job's pictures; every batch comes with its notes.

    Several prompts about one picture share one pass through the vision tower.
    """

    def __init__(
        self, job: Job, model: Model, plan: Plan, entry: CachedModelWithPartialLoad
    ) -> None:
        assert model.architecture.decoder is not None
        self._job = job
        self._decoder = model.architecture.decoder
        self._model = model
        self._plan = plan
        self._entry = entry
        self._pictures = PicturePreprocessor(model)
        self._view = view_of(model, job)
        asking = Prefix if model.family.prompt_style == "prefix" else Chat
        self._asking = asking(model, sampled=job.generation.temperature > 0)
        self._prompts = job.prompts or (Prompt(model.family.default_prompt),)
        for prompt in self._prompts:  # what is refused of one is refused before any picture
            self._asking.input_ids(prompt.text, (1,), system=job.system)

    def batches(self) -> Iterator[Batch]:
        options = decode_options(self._job)
        numbered = list(enumerate(inputs_of(self._job)))
        rows_at_once = self._plan.workload.batch_size
        for group in batched(numbered, max(1, rows_at_once // len(self._prompts))):
            start = time.perf_counter()
            found = read_samples(group, options, cut=self._cut)
            asked = [item for item in found if not isinstance(item, Failure)]
            answers = iter(self._answer(asked))
            each = (time.perf_counter() - start) * 1000 / len(group)
            rows = [
                (item,)
                if isinstance(item, Failure)
                else tuple(self._rows(item, next(answers), each))
                for item in found
            ]
            failed = sum(any(isinstance(row, Failure) for row in own) for own in rows)
            yield Batch(
                tuple(row for own in rows for row in own),
                done=len(rows) - failed,
                failed=failed,
                notes=notes_of(asked),
            )

    def _cut(self, image: Image) -> Question:
        """Raises ImageError where the decoder has no room for what the picture costs."""
        pictures = self._pictures.pictures([image], view=self._view)
        system = self._job.system
        costs = pictures.tokens
        ids = [self._asking.input_ids(p.text, costs, system=system) for p in self._prompts]
        longest = max(map(len, ids))
        if longest >= self._decoder.positions:
            raise ImageError(
                f"takes {longest} tokens with its prompt, "
                f"the model has {self._decoder.positions} positions; "
                "use --detail low or a shorter prompt"
            )
        return Question(pictures, tuple(ids))

    def _answer(self, asked: Sequence[Asked]) -> list[list[Decoded | NotFinite]]:
        """Generate for every picture, in order, and for every prompt, in order."""
        if not asked:
            return []
        pictures = [sample.pixels.pictures for sample in asked]
        features = encode_pictures(self._entry, self._model.architecture, pictures)
        rows = [
            DecodeRow(ids, encoded, seed=sample.index)
            for sample, encoded in zip(asked, features, strict=True)
            for ids in sample.pixels.input_ids
        ]
        decoded: list[Decoded] = []
        for group in batched(rows, self._plan.workload.batch_size):
            decoded += decode(
                self._entry,
                self._decoder,
                group,
                vocabulary=self._asking.vocabulary,
                generation=self._job.generation,
            )
        answers = [
            answer
            if answer.finite
            else self._overflow(pictures[i // len(self._prompts)], row, answer)
            for i, (row, answer) in enumerate(zip(rows, decoded, strict=True))
        ]
        return list(batched(answers, len(self._prompts)))

    def _overflow(self, pictures: Pictures, row: DecodeRow, answer: Decoded) -> NotFinite:
        """The error of a row whose arithmetic overflowed; names the layer where it did."""
        layer = overflow_of_answer(
            self._entry,
            self._model,
            pictures,
            row,
            answer.tokens,
            placeholder_id=self._asking.vocabulary.placeholder_id,
        )
        return overflowed(layer)

    def _rows(
        self, sample: Asked, answers: Sequence[Decoded | NotFinite], ms: float
    ) -> Iterator[Caption | Failure]:
        for prompt, answer in zip(self._prompts, answers, strict=True):
            if isinstance(answer, NotFinite):
                yield failure(answer, path=sample.path)
                continue
            yield Caption(
                path=sample.path,
                prompt=prompt.text,
                caption=f"{self._job.prefix}{answer.text.strip()}{self._job.suffix}",
                model=self._model.source.name,
                revision=self._model.source.revision,
                dtype=self._plan.storage.dtype,
                tokens=len(answer.tokens),
                finish=answer.finish,
                ms=ms,
                sha256=sample.sha256,
                prompt_name=prompt.name,
            )
