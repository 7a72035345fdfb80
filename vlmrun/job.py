"""A run, described in full by plain values: what a flag said, never what was made of it."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

# what of a job leaves the result of an input as it is, and what of its placing does not
INPUTS = frozenset({"placing", "images", "stdin_image", "texts", "scores", "one_array"})
PLACED = ("model", "revision", "dtype", "compute_dtype", "attention")

Backend = Literal["auto", "eager", "sdpa", "sdpa-efficient", "flash_attention_2", "flex_attention"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked of a picture; a name tells several captions of one picture apart."""

    text: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """How tokens are chosen. Temperature 0 is greedy; then top_p, top_k and seed do nothing."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Where a model comes from, how it is stored, and the memory and threads it may take.

    processes: those of one job (`tp`) that share this machine.
    """

    model: str
    revision: str | None = None
    offline: bool = False
    dtype: str = "auto"
    compute_dtype: str = "auto"
    device: str = "auto"
    ram: str | None = None
    vram: str | None = None
    resident: str | None = None
    batch_size: int | None = None
    attention: Backend = "auto"
    threads: int | None = None
    tp: bool = False
    processes: int = 1
    allow_untested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A picklable description of a run.

    images: paths in output order; `-` stands for the bytes in `stdin_image`.
    prompts: empty = the family's own.
    normalize: None = unit length for pooled vectors, as they are otherwise.
    max_patches: of a NaFlex picture; None = what its image processor says.
    scores: how well each text fits each picture, in the pictures' rows.
    one_array: the vectors are written into one array, and so need one shape.
    dynamic_size: show a SigLIP tower pictures at their own size, not squashed to its square.
    """

    task: Literal["caption", "embed"]
    placing: Placing
    images: tuple[str, ...] = ()
    stdin_image: bytes | None = None
    background: tuple[int, int, int] = (255, 255, 255)
    max_pixels: int = 178_956_970
    frame: int = 0
    texts: tuple[str, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    system: str = ""
    detail: Literal["high", "low"] = "high"
    generation: Generation = field(default_factory=Generation)
    prefix: str = ""
    suffix: str = ""
    output_kind: str = "pooled"
    normalize: bool | None = None
    max_patches: int | None = None
    dynamic_size: bool = False
    scores: bool = False
    one_array: bool = False

    def fingerprint(self, products: str) -> str:
        """Sixteen hex digits of what changes the result of an input: the model, its dtypes, what is
        asked of it, and the table that kernels are chosen by (`Products.table`). Not the inputs,
        the form of the output, nor the memory and threads that the run may take."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        parts = {name: value for name, value in parts.items() if name not in INPUTS}
        placed = [getattr(self.placing, name) for name in PLACED]
        said = json.dumps([products, placed, parts], sort_keys=True, default=asdict)
        return hashlib.sha256(said.encode()).hexdigest()[:16]
