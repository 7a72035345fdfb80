"""`vlmrun caption`: one caption per picture and prompt."""

import math
import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import typer

from vlmrun.cli.command import Command, spell, takes_flags
from vlmrun.cli.options import (
    MemoryFlags,
    ModelFlags,
    OutputFlags,
    PictureFlags,
    TalkFlags,
    of_model,
    of_output,
    placing,
)
from vlmrun.cli.running import read_inputs, run_inputs
from vlmrun.cli.texts import check_text, read_text_file
from vlmrun.errors import UsageError
from vlmrun.job import Generation, Job, Prompt

of_prompt = partial(typer.Option, rich_help_panel="Prompt")
of_answer = partial(typer.Option, rich_help_panel="Answer")
COLDEST = 0.001  # temperature
MAX_SEED = 2**63 - 1  # torch takes 64 bits, and every row adds its place
NAMED = re.compile(r"([A-Za-z0-9_-]+)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """What is asked; all of it changes the plan."""

    prompt: Annotated[
        list[str],
        of_prompt(
            "-p",
            "--prompt",
            metavar="TEXT",
            help="What to ask; repeat it for several captions. NAME=TEXT names one: "
            "letters, digits, _ and - right before the first =.",
            show_default="the family's own",
        ),
    ] = field(default_factory=list)
    prompt_file: Annotated[
        str | None, of_prompt(metavar="FILE", help="One more prompt: the whole of FILE.")
    ] = None
    system: Annotated[
        str, of_prompt(metavar="TEXT", help="System message.", show_default=False)
    ] = ""
    detail: Annotated[
        Literal["high", "low"],
        of_prompt(help="low: one view of a picture and no tiles, for less work."),
    ] = "high"
    max_new_tokens: Annotated[
        int, of_prompt(min=1, metavar="N", help="Longest caption in tokens.")
    ] = Generation().max_new_tokens

    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts in the order given, the file's last.

        Raises:
            UsageError: two have the same name, or one is not UTF-8.
        """
        found = [read_prompt(text) for text in self.prompt]
        if self.prompt_file is not None:
            found.append(Prompt(read_text_file(self.prompt_file, where="--prompt-file").rstrip()))
        names = [prompt.name for prompt in found if prompt.name is not None]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"two prompts are named {twice[0]!r}", "give each its own name")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    temperature: Annotated[
        float, of_answer(min=0.0, metavar="X", help="0 takes the likeliest token (greedy).")
    ] = 0.0
    top_p: Annotated[
        float, of_answer(metavar="X", help="Sample from the likeliest tokens of this share.")
    ] = 1.0
    top_k: Annotated[
        int, of_answer(min=0, metavar="N", help="Sample from the N likeliest tokens; 0: all.")
    ] = 0
    seed: Annotated[
        int, of_answer(min=0, max=MAX_SEED, metavar="N", help="Seed of the sampling.")
    ] = 0
    stop: Annotated[
        list[str],
        of_answer(metavar="TEXT", help="End a caption before TEXT; may be repeated."),
    ] = field(default_factory=list)
    prefix: Annotated[
        str, of_answer(metavar="TEXT", help="Put TEXT before every caption.", show_default=False)
    ] = ""
    suffix: Annotated[
        str, of_answer(metavar="TEXT", help="Put TEXT after every caption.", show_default=False)
    ] = ""
    one_line: Annotated[
        bool, of_answer("--one-line", help="Turn line breaks in captions into spaces.")
    ] = False
    filenames: Annotated[
        bool | None,
        of_output(
            "-H/--no-filename",
            help="Put the path before every caption, or leave it out.",
            show_default="left out if one file was named",
        ),
    ] = None
    allow_untested: Annotated[
        bool,
        of_model("--allow-untested", help="Try a model of an unknown family, loaded as a whole."),
    ] = False

    def generation(self, max_new_tokens: int) -> Generation:
        """How tokens are chosen.

        Raises:
            UsageError: a number is out of its range, or a stop string is empty.
        """
        if not math.isfinite(self.temperature):
            raise UsageError(f"--temperature {self.temperature}: not a number", "use 0 to 2")
        if 0 < self.temperature < COLDEST:
            raise UsageError(
                f"--temperature {self.temperature:g}: logits divided by it overflow",
                f"use 0, which takes the likeliest token, or at least {COLDEST}",
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p:g}: not in (0, 1]", "1 leaves it off")
        if "" in self.stop:
            raise UsageError("--stop is empty", "give the text that ends a caption")
        return Generation(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=tuple(check_text(text, where="--stop") for text in self.stop),
        )

    def notes(self) -> tuple[str, ...]:
        """A note on flags that need sampling, where there is none."""
        given = {"--top-p": self.top_p < 1, "--top-k": self.top_k, "--seed": self.seed}
        idle = [flag for flag, changed in given.items() if changed and not self.temperature]
        return (f"{', '.join(idle)}: without effect at --temperature 0",) if idle else ()


def read_prompt(text: str) -> Prompt:
    match = NAMED.fullmatch(check_text(text, where="--prompt"))
    return Prompt(match[2], match[1]) if match else Prompt(text)


@takes_flags
def caption(
    pictures: PictureFlags,
    asked: PromptFlags,
    answer: AnswerFlags,
    model: ModelFlags,
    memory: MemoryFlags,
    output: OutputFlags,
    talk: TalkFlags,
) -> Command:
    """Write one caption per picture.

    Without INPUT, paths are read from standard input, one per line. One named
    file gives the caption alone; several files, a folder or a list give the
    path, a tab and the caption on each line.
    """

    def start() -> int:
        decoding = pictures.decoding()
        job = Job(
            task="caption",
            placing=placing(
                model,
                memory,
                spec=model.spec("caption"),
                tp=output.tp,
                allow_untested=answer.allow_untested,
            ),
            background=decoding.background,
            max_pixels=decoding.max_pixels,
            frame=decoding.frame,
            prompts=asked.prompts(),
            system=check_text(asked.system, where="--system"),
            detail=asked.detail,
            generation=answer.generation(asked.max_new_tokens),
            prefix=check_text(answer.prefix, where="--prefix"),
            suffix=check_text(answer.suffix, where="--suffix"),
        )
        command = spell("caption", model, memory, asked, answer, pictures, output, talk)
        inputs = read_inputs(pictures, stdin_is_list=True, tp=output.tp)
        if inputs.images:
            inputs = replace(inputs, notes=(*answer.notes(), *inputs.notes))
        return run_inputs(
            job,
            inputs,
            flags=output,
            talk=talk,
            command=command,
            filenames=answer.filenames,
            one_line=answer.one_line,
        )

    return Command(start, talk)
