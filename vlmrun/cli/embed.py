"""`vlmrun embed`: one vector per picture and per text."""

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

from vlmrun.cli.command import Command, spell, takes_flags
from vlmrun.cli.options import (
    EmbedModelFlags,
    MemoryFlags,
    OutputFlags,
    PictureFlags,
    TalkFlags,
    placing,
)
from vlmrun.cli.running import read_inputs, run_inputs
from vlmrun.cli.texts import check_text, read_stdin_text, read_text_file
from vlmrun.errors import UsageError
from vlmrun.job import Job

of_vectors = partial(typer.Option, rich_help_panel="Vectors")
KINDS = re.compile(r"pooled|last-hidden|hidden:-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class VectorFlags:
    """What is embedded beside pictures, and what comes out; all of it changes the plan."""

    text: Annotated[
        list[str],
        of_vectors("-t", "--text", metavar="TEXT", help="Embed TEXT, too; may be repeated."),
    ] = field(default_factory=list)
    texts_from: Annotated[
        str | None,
        of_vectors(metavar="FILE", help="Embed every line of FILE, or - for stdin."),
    ] = None
    output_kind: Annotated[
        str,
        of_vectors(
            metavar="KIND",
            help="pooled (for search), last-hidden (all patches), or hidden:K (a layer's output, "
            "hidden:-2 for the last but one).",
        ),
    ] = "pooled"
    max_patches: Annotated[
        int | None,
        of_vectors(
            min=1,
            metavar="N",
            help="NaFlex: scale pictures to at most N patches; with last-hidden, rows of zeros "
            "fill up to N.",
            show_default="what the model's settings say",
        ),
    ] = None
    dynamic_size: Annotated[
        bool,
        of_vectors(
            "--dynamic-size",
            help="Fixed-size SigLIP: show pictures at their own size, not squashed; with "
            "last-hidden, pictures of several sizes need --format jsonl.",
        ),
    ] = False

    def texts(self, *, stdin_allowed: bool = True) -> tuple[str, ...]:
        """The texts in the order given, the file's last without its blank lines.

        Raises:
            UsageError: the file cannot be read, or a text is empty or not UTF-8.
        """
        if not all(text.strip() for text in self.text):
            raise UsageError("--text is empty", "give the text to embed")
        texts = [check_text(text, where="--text") for text in self.text]
        if self.texts_from == "-":
            if not stdin_allowed:
                raise UsageError(
                    "--texts-from -: standard input is not read here",
                    "name a file, or give the texts with --text",
                )
            texts += read_stdin_text(where="--texts-from").splitlines()
        elif self.texts_from is not None:
            texts += read_text_file(self.texts_from, where="--texts-from").splitlines()
        return tuple(text for text in texts if text.strip())

    def kind(self) -> str:
        """The output kind.

        Raises:
            UsageError: there is none of that name.
        """
        if not KINDS.fullmatch(self.output_kind):
            raise UsageError(
                f"unknown output kind {self.output_kind!r}",
                "use pooled, last-hidden or hidden:-2",
            )
        return self.output_kind


@dataclass(frozen=True, slots=True)
class LengthFlags:
    normalize: Annotated[
        bool | None,
        of_vectors(
            "--normalize/--no-normalize",
            help="Scale vectors to length 1.",
            show_default="on for pooled, off otherwise",
        ),
    ] = None
    scores: Annotated[
        bool,
        of_vectors(
            "--scores",
            help="Add to a picture's row how well every text fits it: cosine, and the model's "
            "own probability.",
        ),
    ] = False


@takes_flags
def embed(
    pictures: PictureFlags,
    vectors: VectorFlags,
    length: LengthFlags,
    model: EmbedModelFlags,
    memory: MemoryFlags,
    output: OutputFlags,
    talk: TalkFlags,
) -> Command:
    """Write one vector per picture and per text.

    Without INPUT and texts, paths are read from standard input, one per line.
    Vectors go to standard output as JSON Lines, or with -o into an array with
    an index beside it.
    """

    def start() -> int:
        if vectors.texts_from == "-" and ("-" in pictures.inputs or pictures.files_from == "-"):
            raise UsageError("standard input is asked for more than once", "give - once")
        decoding, texts = pictures.decoding(), vectors.texts(stdin_allowed=not output.tp)
        if length.scores and not texts:
            raise UsageError("--scores: there are no texts", "give some with -t or --texts-from")
        if length.scores and not pictures.inputs and pictures.files_from is None:
            raise UsageError("--scores: there are no pictures", "name some beside the texts")
        job = Job(
            task="embed",
            placing=placing(model, memory, spec=model.spec("embed"), tp=output.tp),
            background=decoding.background,
            max_pixels=decoding.max_pixels,
            frame=decoding.frame,
            texts=texts,
            output_kind=vectors.kind(),
            normalize=length.normalize,
            max_patches=vectors.max_patches,
            dynamic_size=vectors.dynamic_size,
            scores=length.scores,
        )
        with_texts = bool(vectors.text) or vectors.texts_from is not None
        return run_inputs(
            job,
            read_inputs(pictures, stdin_is_list=not with_texts, tp=output.tp),
            flags=output,
            talk=talk,
            command=spell("embed", model, memory, vectors, length, pictures, output, talk),
        )

    return Command(start, talk)
