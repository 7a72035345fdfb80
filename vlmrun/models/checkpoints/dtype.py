"""Names of number formats, their sizes, and which one a model is stored in.

Knows nothing of torch: the same names are used in plans, flags and rows.
"""

from collections.abc import Mapping
from enum import StrEnum

from vlmrun.errors import CheckpointError, UsageError


class Dtype(StrEnum):
    """A format that weights are stored in; all but int8 are computed in as well."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    int8 = "int8"

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return {Dtype.float32: 4, Dtype.int8: 1}.get(self, 2)


ALIASES = {"fp32": Dtype.float32, "bf16": Dtype.bfloat16, "fp16": Dtype.float16}
SAFETENSORS = {"F32": Dtype.float32, "BF16": Dtype.bfloat16, "F16": Dtype.float16}
LOSSY = "lossy: matrices of linear layers, a scale for each row; the rest as stored"


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


def parse_compute_dtype(name: str) -> Dtype | None:
    """Read a flag that names what arithmetic runs in; None stands for `auto`.

    Raises:
        UsageError: the name is none of the accepted ones, or int8.
    """
    dtype = parse_dtype(name)
    if dtype is Dtype.int8:
        raise UsageError(
            "--compute-dtype int8: weights are stored so, nothing is computed in it",
            "use --dtype int8, and float32, bfloat16 or float16 here",
        )
    return dtype


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
        return requested, LOSSY if requested is Dtype.int8 else "asked for"
    most = max(stored_bytes, key=lambda dtype: stored_bytes[dtype])
    if len(stored_bytes) == 1:
        return most, "as stored in the checkpoint"
    share = stored_bytes[most] / sum(stored_bytes.values())
    return most, f"{share:.1%} of the checkpoint's bytes are stored so"


def float_dtype(dtype: Dtype, stored_bytes: Mapping[Dtype, int]) -> Dtype:
    """What arithmetic is chosen by where weights are kept in `dtype`: it, or beside int8 the
    floats that most of the checkpoint is stored in."""
    return resolve_dtype(None, stored_bytes)[0] if dtype is Dtype.int8 else dtype
