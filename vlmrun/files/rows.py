"""What one input came to, and the row (schema version 1) that is written about it.

Rows are valid UTF-8 whatever the inputs are called: a byte of a path, text or prompt that is not
UTF-8 stands in its row as four characters, `\\xNN`. So `b"caf\\xe9.jpg"` becomes `caf\\\\xe9.jpg`
in JSON.
"""

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

VERSION = 1
SURROGATE = re.compile("[\ud800-\udfff]")  # stands for a byte that is not UTF-8
Fields = dict[str, object]


@dataclass(frozen=True, slots=True)
class Caption:
    """One caption of one picture. `ms`: time its picture took, in milliseconds."""

    path: str
    prompt: str
    caption: str
    model: str
    revision: str | None
    dtype: str
    tokens: int
    finish: Literal["stop", "length"]
    ms: float
    sha256: str
    prompt_name: str | None = None

    def row(self) -> Fields:
        name = {} if self.prompt_name is None else {"prompt_name": readable(self.prompt_name)}
        return {
            "v": VERSION,
            "path": readable(self.path),
            "prompt": readable(self.prompt),
            **name,
            "caption": readable(self.caption),
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "finish": self.finish,
            "ms": round(self.ms, 3),
            "sha256": self.sha256,
        }


@dataclass(frozen=True, slots=True)
class Score:
    """How well a text fits a picture, by the model's own measure."""

    text: str
    cosine: float
    probability: float

    def row(self) -> Fields:
        return {
            "text": readable(self.text),
            "cosine": self.cosine,
            "probability": self.probability,
        }


@dataclass(frozen=True, slots=True)
class Embedding:
    """One vector, [D] or [N, D] in float32, of a picture or of a text."""

    path: str | None
    text: str | None
    vector: "npt.NDArray[np.float32]"
    output_kind: str
    model: str
    revision: str | None
    dtype: str
    ms: float
    sha256: str | None
    scores: tuple[Score, ...] = ()

    def row(self, *, index: int | None = None) -> Fields:
        """The row with the vector in it, or with its index in the array that holds it."""
        place: Fields = {"embedding": self._numbers()} if index is None else {"index": index}
        return {
            "v": VERSION,
            **_source(self.path, self.text),
            **place,
            **({"scores": [score.row() for score in self.scores]} if self.scores else {}),
            "output_kind": self.output_kind,
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            "ms": round(self.ms, 3),
            "sha256": self.sha256,
        }

    def _numbers(self) -> object:
        # By way of text: the shortest digits that give the same float32, not those of a float64.
        return self.vector.astype(str).astype(float).tolist()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no result for a picture or a text. `type` is the name of the error's class."""

    path: str | None
    text: str | None
    type: str
    message: str

    def row(self) -> Fields:
        error = {"type": self.type, "message": readable(self.message)}
        return {"v": VERSION, **_source(self.path, self.text), "error": error}


Row = Caption | Embedding | Failure


def _source(path: str | None, text: str | None) -> Fields:
    assert (path is None) != (text is None), "a row is about a picture or about a text"
    return {"path": readable(path)} if path is not None else {"text": readable(text or "")}


def readable(text: str) -> str:
    """Text without lone surrogates: a byte that is not UTF-8 becomes `\\xNN`."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def to_json(fields: Fields) -> bytes:
    """One row as a line of JSON; what `readable` is for, in any of its texts, is done."""
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
    return SURROGATE.sub(lambda found: rf"\\x{ord(found[0]) & 0xFF:02x}", text).encode() + b"\n"


def fold(text: str) -> str:
    """Text on one line: line breaks, with the blanks around them, become one space."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
