"""What may go wrong, and the exit code each kind carries.

VlmrunError               1  could not run
├── UsageError            2  the command line contradicts itself or names what does not exist
├── SourceError           1  the model cannot be found, reached or downloaded
├── CheckpointError       1  the folder's files are damaged, incomplete or contradict each other
├── UnsupportedModel      1  the model is sound, but vlmrun does not run it, or not in this way
├── ImageError            1  one picture cannot be decoded (becomes that picture's error row)
├── NotFinite             1  the arithmetic overflowed (becomes that input's error row)
├── OutputError           1  the output cannot be written, or another run is writing it
├── ProcessLost           1  another of the processes that share a model has ended, or is stuck
└── OutOfBudget           4  does not fit; carries the smallest budget that would do
"""

LONGEST = 1000  # characters of a message; a damaged file's values may be of any length


class VlmrunError(Exception):
    """A known error: one line for the user, one line of what to do about it.

    An error that becomes a row says both in its message, and has no hint. The middle of a
    message that is too long is left out.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 4 :]}"
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(VlmrunError):
    exit_code = 2


class SourceError(VlmrunError):
    pass


class CheckpointError(VlmrunError):
    pass


class UnsupportedModel(VlmrunError):
    pass


class ImageError(VlmrunError):
    pass


class NotFinite(VlmrunError):
    pass


class OutputError(VlmrunError):
    pass


class ProcessLost(VlmrunError):
    pass


class OutOfBudget(VlmrunError):
    exit_code = 4
