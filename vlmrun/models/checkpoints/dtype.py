"""Names of number formats, their sizes, and which one a model is stored in.

Knows nothing of torch: the same names are used in plans, flags and rows.
"""

from collections.abc import Mapping
from enum import StrEnum

from vlmrun.errors import CheckpointError, UsageError


class Dtype(StrEnum):
    """A floating-point format that weights are stored or computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return 4 if self is Dtype.float32 else 2


ALIASES = {"fp32": Dtype.float32, "bf16": Dtype.bfloat16, "fp16": Dtype.float16}
SAFETENSORS = {"F32": Dtype.float32, "BF16": Dtype.bfloat16, "F16": Dtype.float16}


def parse_dtype(name: str) -> Dtype | None:
    """Read a dtype flag; None stands for `auto`.

    Raises:
        UsageError: the name is none of the accepted ones.
    """
    if name == "auto":
        return None
    if name in ALIASES:
        return ALIASES[name]
    if name in Dtype.__members__:
        return Dtype(name)
    accepted = ", ".join(["auto", *Dtype, *ALIASES])
    raise UsageError(f"unknown dtype {name!r}", f"accepted: {accepted}")


def resolve_dtype(requested: Dtype | None, stored_bytes: Mapping[Dtype, int]) -> tuple[Dtype, str]:
    """Choose the dtype weights are kept in, and say why.

    `stored_bytes` counts the checkpoint's bytes by dtype. Without a request the dtype that
    holds most of them wins, so that nothing is converted that need not be.
    """
    if not stored_bytes:
        raise CheckpointError(
            "the checkpoint holds no floating-point weights", "is this a model's folder?"
        )
    if requested is not None:
        return requested, "asked for"
    most = max(stored_bytes, key=lambda dtype: stored_bytes[dtype])
    if len(stored_bytes) == 1:
        return most, "as stored in the checkpoint"
    share = stored_bytes[most] / sum(stored_bytes.values())
    return most, f"{share:.1%} of the checkpoint's bytes are stored so"
