"""What a command run in process came to, and the streams it ran with."""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from typing import Any


class Terminal(TextIOWrapper):
    def isatty(self) -> bool:
        return True


class Watched(BytesIO):
    """Bytes that tell someone whenever they grow."""

    def __init__(self, start: bytes, tell: Callable[[], None]) -> None:
        super().__init__(start)
        self._tell = tell

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._tell()
        return count


@dataclass(frozen=True)
class Done:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


Command = Callable[..., Done]
