"""Compiled calls for the steps of a decoder, given to its blocks where they may serve."""

import torch
from torch import nn

from vlmrun.memory.plan import Plan
from vlmrun.models.checkpoints.reading import torch_dtype
from vlmrun.nn.decoder import CACHED, DecoderBlock, parts_of


def give_calls(module: nn.Module, plan: Plan) -> None:
    """Have decoder blocks run a step as one call, and compile it: where the loops multiply a few
    rows, and no attention is asked for by name."""
    attention = plan.storage.attention.get("decode")
    compute = torch_dtype(plan.storage.compute_dtype)
    if attention is None or attention.forced or compute not in CACHED:
        return
    few = plan.storage.products.kernels.get(plan.storage.dtype, ())[:1]
    if not plan.storage.products.compiled or [kernel for _, kernel in few] != ["loops"]:
        return
    from vlmrun.nn.kernels import page_out
    from vlmrun.nn.kernels.call import BlockCall, address_of  # late: numba

    several = plan.workload.batch_size > 1
    for path, block in module.named_modules():
        parts = parts_of(block) if isinstance(block, DecoderBlock) else None
        kinds = kept_of(path, plan) if parts is not None else None
        if parts is None or kinds is None:
            continue
        assert isinstance(block, DecoderBlock)
        address_of(*kinds, compute, several)
        block.call = BlockCall(**parts)
    page_out("llvmlite")


def kept_of(path: str, plan: Plan) -> tuple[torch.dtype, torch.dtype] | None:
    """The dtypes that a block's matrices, and its norms and biases are kept in; None where not all
    of them are alike, as a call takes them to be."""
    layers = (use.layer for use in plan.placements if use.layer.module == path)
    weights = [weight for layer in layers for weight in layer.weights]
    kept = {(len(w.shape), torch_dtype(w.kept(plan.storage.dtype))) for w in weights}
    matrices, vectors = ([dtype for n, dtype in kept if n == count] for count in (2, 1))
    return (matrices[0], vectors[0]) if len(matrices) == len(vectors) == 1 else None
