"""Compiled calls for the steps of a decoder, given to its blocks where they may serve."""

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

    layers = (use.layer for use in plan.placements if use.layer.part == "decoder")
    kept = {
        w.path: torch_dtype(w.kept(plan.storage.dtype)) for each in layers for w in each.weights
    }
    for path, block in module.named_modules():
        parts = parts_of(block) if isinstance(block, DecoderBlock) else None
        if parts is None or f"{path}.self_attn.q_proj.weight" not in kept:
            continue
        assert isinstance(block, DecoderBlock)
        matrix = kept[f"{path}.self_attn.q_proj.weight"]
        vector = kept[f"{path}.input_layernorm.weight"]
        address_of(matrix, vector, compute, plan.workload.batch_size > 1)
        block.call = BlockCall(**parts)
    page_out("llvmlite")
