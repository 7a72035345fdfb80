"""From the kernels that are planned to those that multiply: tried, compiled, given to layers."""

import math
from dataclasses import replace

from torch import nn

from vlmrun.memory.plan import Plan
from vlmrun.memory.products import Products
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.checkpoints.reading import torch_dtype
from vlmrun.nn.kernels import Product, compile_product, find_product
from vlmrun.nn.linear import CastLinear, Kernel, Kernels, loops, native, tiled


def settle_products(module: nn.Module, plan: Plan) -> Plan:
    """Try the compiled loops where they are planned, and give all linear layers their kernels;
    PyTorch serves where the loops fail. Returns the plan with what was found to work."""
    products, product = plan.storage.products, None
    if products.compiled:
        product, why = find_product()
        if product is None:
            products = Products(False, why)
            return replace(plan, storage=replace(plan.storage, products=products))
        for dtype in kept_matrices(module, plan):
            compile_product(product, torch_dtype(dtype), rows=plan.workload.batch_size)
    kernels = kernels_of(plan, product)
    for layer in module.modules():
        if isinstance(layer, CastLinear):
            layer.kernels = kernels
    return plan


def kernels_of(plan: Plan, product: Product | None) -> Kernels:
    """The plan's kernels as functions, by the dtypes of a weight and of the input. Without the
    loops, which a table may name for dtypes that are in the minority, PyTorch's own way serves."""
    compute = torch_dtype(plan.storage.compute_dtype)
    by_name: dict[str, Kernel] = {"native": native, "tiles": tiled}
    if product is not None:
        by_name["loops"] = loops(product)
    return {
        (torch_dtype(stored), compute): tuple(
            (math.inf if most is None else most, by_name[name]) for most, name in kernels
        )
        for stored, kernels in plan.storage.products.kernels.items()
        if product is not None or not uses_loops(plan.storage.products, stored)
    }


def kept_matrices(module: nn.Module, plan: Plan) -> list[Dtype]:
    """What weights of linear layers are kept in, but for what PyTorch multiplies by itself."""
    products, dtype = plan.storage.products, plan.storage.dtype
    weights = (w for use in plan.placements if not use.layer.gathered for w in use.layer.weights)
    found = {
        weight.kept(dtype)
        for weight in weights
        if len(weight.shape) == 2
        and isinstance(module.get_submodule(weight.path.rpartition(".")[0]), CastLinear)
    }
    return sorted(each for each in found if uses_loops(products, each))


def uses_loops(products: Products, stored: Dtype) -> bool:
    return any(name == "loops" for _, name in products.kernels.get(stored, ()))
