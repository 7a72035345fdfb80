"""The batches of a `caption` job: files in, one row per picture and prompt out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL.Image import Image

from vlmrun.errors import ImageError, NotFinite
from vlmrun.files.images import read_size
from vlmrun.files.inputs import ImageInput
from vlmrun.files.rows import Caption, Failure
from vlmrun.job import Job, Prompt
from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.plan import Plan
from vlmrun.memory.workload import view_of
from vlmrun.models.model import Model
from vlmrun.tasks.batches import Finished, InTurn, Reading, alike, overlapped
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
    read_sample,
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
        self._turns = InTurn()
        self._options = decode_options(job)
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
        numbered = list(enumerate(inputs_of(self._job)))
        size = max(1, self._plan.workload.batch_size // len(self._prompts))
        tiled = self._model.architecture.tiling is not None and self._view.detail == "high"
        alone = size == 1 or not tiled  # else pictures of different size cost different numbers
        groups = batched(numbered, size) if alone else alike(numbered, size, self._cost)
        count = -(-len(numbered) // size)
        for group in overlapped(groups, self._read, self._finish, count=count):
            yield self._turns.take(group)

    def rest(self) -> Batch:
        """What is finished and waits for its turn, for a run that ends early."""
        return self._turns.rest()

    def _cost(self, image: ImageInput) -> int:
        """Tokens of a picture by its header; of one that will be an error row, none."""
        try:
            width, height = read_size(image, options=self._options)
        except ImageError:
            return 0
        model = self._model
        return model.family.image_cost(model.architecture, width, height, self._view).tokens

    def _read(self, index: int, image: ImageInput) -> Sample[Pictures] | Failure:
        return read_sample(index, image, self._options, cut=self._cut)

    def _cut(self, image: Image) -> Pictures:
        return self._pictures.pictures([image], view=self._view)

    def _finish(self, reading: Reading[Pictures]) -> list[tuple[int, Finished]]:
        """The rows of a batch's pictures, each with the picture's place."""
        found = [self._asked(read) for read in reading.found]
        asked = [item for item in found if not isinstance(item, Failure)]
        answers = iter(self._answer(asked))
        each = reading.ms_each()
        finished = [
            Finished((item,))
            if isinstance(item, Failure)
            else Finished(tuple(self._rows(item, next(answers), each)), notes_of([item]))
            for item in found
        ]
        return list(zip(reading.places, finished, strict=True))

    def _asked(self, read: Sample[Pictures] | Failure) -> Asked | Failure:
        """A picture with what is asked of it; a failure where the decoder has no room for what
        it costs."""
        if isinstance(read, Failure):
            return read
        system, costs = self._job.system, read.pixels.tokens
        ids = [self._asking.input_ids(p.text, costs, system=system) for p in self._prompts]
        longest = max(map(len, ids))
        if longest >= self._decoder.positions:
            error = ImageError(
                f"takes {longest} tokens with its prompt, "
                f"the model has {self._decoder.positions} positions; "
                "use --detail low or a shorter prompt"
            )
            return failure(error, path=read.path)
        question = Question(read.pixels, tuple(ids))
        return Sample(read.index, read.path, read.sha256, read.notes, question)

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
        by_length = sorted(range(len(rows)), key=lambda at: len(rows[at].input_ids))
        decoded: dict[int, Decoded] = {}
        for places in map(sorted, batched(by_length, self._plan.workload.batch_size)):
            made = decode(
                self._entry,
                self._decoder,
                [rows[at] for at in places],
                vocabulary=self._asking.vocabulary,
                generation=self._job.generation,
            )
            decoded.update(zip(places, made, strict=True))
        answers = [
            decoded[at]
            if decoded[at].finite
            else self._overflow(pictures[at // len(self._prompts)], row, decoded[at])
            for at, row in enumerate(rows)
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
