"""From a plan to a model that can be used: skeleton, swapped layers, reader, cache entry."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vlmrun.errors import CheckpointError, UnsupportedModel, UsageError
from vlmrun.memory.attention import FLASH, TOWERS, Attention, head_dim, hint_of
from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.memory.calls import give_calls
from vlmrun.memory.kernels import settle_products
from vlmrun.memory.plan import Plan, Storage
from vlmrun.models.checkpoints.checkpoint import TensorInfo
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.checkpoints.quantising import dequantised, quantise
from vlmrun.models.checkpoints.reading import WeightReader, torch_dtype
from vlmrun.models.family import Config, Phase, contradiction
from vlmrun.models.layer import Weight
from vlmrun.models.model import Model
from vlmrun.models.quiet import quiet_transformers
from vlmrun.nn.backends import is_fused, register_backends, try_backend
from vlmrun.nn.embedding import CastEmbedding, TokenTable
from vlmrun.nn.linear import CastLinear, RowBlocks
from vlmrun.nn.parallel import RowParallelLinear
from vlmrun.nn.swap import swap_layers

COMPARE_ROWS = 1024
LABELS = ("num_labels", "id2label", "label2id")


def load(model: Model, plan: Plan) -> CachedModelWithPartialLoad:
    """Build the module on meta and make it ready to bind layers; weights are read on use.

    The entry's plan is this one with the attention and the products that were found to work.

    Raises:
        CheckpointError: tensors that the configuration ties differ in the file, or it holds a
            value that no such module can have.
        UnsupportedModel: a layer of the module has no class that casts on the fly.
        UsageError: the attention that was asked for does not work here.
    """
    torch.set_num_threads(plan.budget.threads.count)  # before anything is computed
    plan = settle_attention(model, plan)
    with WeightReader() as reader:
        check_ties(model, reader)
    reader = WeightReader()
    compute_dtype = torch_dtype(plan.storage.compute_dtype)
    module = build_skeleton(model, plan.storage.attention)
    with torch.device("meta"):
        swap_layers(module, compute_dtype)
        cut_heads(module, model)
        join_parts(module, model)
        share_heads(module, model)
    plan = settle_products(module, plan)
    give_calls(module, plan)
    gather_tables(module, model, plan, reader)
    materialise_buffers(module, plan.storage.device)
    return CachedModelWithPartialLoad(module.eval(), model, plan, reader)


def settle_attention(model: Model, plan: Plan) -> Plan:
    """Try every tower's attention with a tiny call, and write into the plan what works.

    Raises:
        UsageError: a backend that was asked for does not.
    """
    found = {
        phase: settled(model, phase, wanted, plan.storage)
        for phase, wanted in plan.storage.attention.items()
    }
    return replace(plan, storage=replace(plan.storage, attention=found))


def settled(model: Model, phase: Phase, wanted: Attention, storage: Storage) -> Attention:
    """What one tower's attention runs through: as planned, or where that is flash attention and
    fails without a flag that names it, PyTorch's own kernels."""
    width, device = head_dim(model.architecture, phase), torch.device(storage.device)
    dtype = torch_dtype(storage.compute_dtype)
    failure = try_backend(wanted.backend, head_dim=width, dtype=dtype, device=device)
    heads = f"heads of {width} in {storage.compute_dtype} on {storage.device}"
    if failure and (wanted.forced or wanted.backend != FLASH):
        raise UsageError(
            f"--attention {wanted.backend} does not work for {TOWERS[phase]} attention, "
            f"{heads}: {failure}",
            hint_of(model.architecture, phase) if wanted.forced else "use --attention eager",
        )
    if wanted.backend == FLASH and not failure and not wanted.forced:
        return Attention(FLASH, f"tried with {heads}")
    if wanted.forced or wanted.backend == "eager":
        return wanted
    fused = is_fused(head_dim=width, dtype=dtype, device=device)
    reason = f"PyTorch has {'a' if fused else 'no'} fused kernel for {heads}"
    return Attention("sdpa", f"{reason}; {FLASH}: {failure}" if failure else reason)


def build_skeleton(model: Model, attention: Mapping[Phase, Attention]) -> nn.Module:
    """The stock module on meta, every tower with its attention; a tower without computes it by
    plain products, as every model can.

    Raises:
        CheckpointError: the configuration holds a value that no such module can have.
    """
    import transformers  # late: lazy itself, and half a second where it is not needed

    try:
        with quiet_transformers(), torch.device("meta"):
            named = model.family.config_type or model.config["model_type"]
            settings = {**without_labels(model.config), "model_type": named}
            config_class = transformers.CONFIG_MAPPING[named]
            config = config_class.from_dict(
                settings, attn_implementation=implementations(model, attention)
            )
            module: nn.Module = getattr(transformers, model.family.model_class)(config)
    except MemoryError:
        raise
    except Exception as error:  # configurations and modules raise nothing narrower
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise contradiction(f"transformers builds no model from it: {reason}") from error
    text = model.architecture.text
    if text is not None and text.projection is None:  # what is pooled is the vector
        module.set_submodule("text_model.head", nn.Identity())
    return module


def without_labels(config: Config) -> dict[str, Any]:
    """A configuration and its parts without what only classifiers need, all of which
    transformers would write out: a damaged number of labels fills memory."""
    return {
        name: without_labels(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in LABELS
    }


def implementations(model: Model, attention: Mapping[Phase, Attention]) -> dict[str, str]:
    """The backends as transformers names the parts of a configuration; "" is its top, which a
    vision tower alone is made from."""
    register_backends()
    taken = {phase: each.backend for phase, each in attention.items()}
    vision = taken.get("vision", "eager")
    text = taken.get("text" if model.architecture.decoder is None else "decode", "eager")
    return {"": vision, "vision_config": vision, "text_config": text}


def cut_heads(module: nn.Module, model: Model) -> None:
    """Replace a matrix that the model's layers cut into row blocks by its pieces."""
    for block in model.architecture.blocks:
        if not block.row_blocks:
            continue
        whole = module.get_submodule(block.module)
        assert isinstance(whole, CastLinear)
        pieces = [layer.weights[0].shape[0] for layer in model.layers if layer.block == block.name]
        module.set_submodule(block.module, RowBlocks(whole.weight.shape[1], pieces))


def join_parts(module: nn.Module, model: Model) -> None:
    """Have layers of whose weight this process has some columns add up all processes' parts."""
    for weight in (weight for layer in model.layers for weight in layer.weights):
        if weight.columns is None:
            continue
        path = weight.path.removesuffix(".weight")
        whole = module.get_submodule(path)
        assert isinstance(whole, CastLinear)
        rows, columns = weight.shape
        part = RowParallelLinear(columns, rows, bias=whole.bias is not None)
        module.set_submodule(path, part)


def share_heads(module: nn.Module, model: Model) -> None:
    """Tell the decoder how many of its query heads share a key-value head in this process:
    fewer than in the whole model where several processes keep the same."""
    decoder = model.architecture.decoder
    if decoder is None:
        return
    for attention in module.modules():
        if hasattr(attention, "num_key_value_groups"):
            groups = decoder.heads // decoder.kv_heads
            attention.num_key_value_groups = groups  # type: ignore[assignment]


def gather_tables(module: nn.Module, model: Model, plan: Plan, reader: WeightReader) -> None:
    """Replace token tables by ones that read rows from the checkpoint."""
    quantised = plan.storage.dtype is Dtype.int8
    for layer in model.layers:
        if not layer.gathered:
            continue
        stock = module.get_submodule(layer.module)
        assert isinstance(stock, CastEmbedding)
        weight = layer.weights[0]
        info = model.checkpoint.tensors[weight.key]
        dtype = torch_dtype(weight.kept(plan.storage.dtype))

        def read_rows(
            ids: list[int],
            info: TensorInfo = info,
            key: str = weight.key,
            dtype: torch.dtype = dtype,
            as_head: bool = layer.tied and quantised,
        ) -> torch.Tensor:
            rows = reader.read_rows(info, ids, dtype, key)
            return dequantised(*quantise(rows)) if as_head else rows

        table = TokenTable(weight.shape[1], compute_dtype=stock.compute_dtype, scale=stock.scale)
        table.read_rows = read_rows
        module.set_submodule(layer.module, table)


def materialise_buffers(module: nn.Module, device: str) -> None:
    """Give buffers that no file holds (rotary frequencies) their values, in float32.

    transformers' `_init_weights` is where its model classes compute them.

    Raises:
        UnsupportedModel: a buffer stays without a value.
    """
    for name, owner in module.named_modules():
        buffers = dict(owner.named_buffers(recurse=False))
        if not any(buffer.is_meta for buffer in buffers.values()):
            continue
        for key, buffer in buffers.items():
            unset = float("nan") if buffer.is_floating_point() else -1
            filled = torch.full_like(buffer, unset, device=device)
            owner.register_buffer(key, filled, persistent=False)
        module._init_weights(owner)  # type: ignore[operator]
        for key, buffer in owner.named_buffers(recurse=False):
            if not (buffer >= 0).all():
                raise UnsupportedModel(
                    f"the value of the buffer {name}.{key} is not known",
                    "install a version of transformers that vlmrun was tested with",
                )


def check_ties(model: Model, reader: WeightReader) -> None:
    """Where a file holds both of two tied tensors, they must be the same.

    Raises:
        CheckpointError: they differ, so either the file or the configuration is wrong.
    """
    weights = [weight for layer in model.layers for weight in layer.weights]
    for one, other in model.architecture.ties.items():
        table = next(weight for weight in weights if weight.path == one)
        owner = other.removesuffix("weight")
        pieces = [w for w in weights if w.path.startswith(owner) and w.key != table.key]
        for piece in pieces:
            if not same_rows(table, piece, model, reader):
                raise CheckpointError(
                    f"config.json ties {table.key} and {piece.key}, but they differ in the file",
                    "set tie_word_embeddings to false, or remove the tensor that is not meant",
                )


def same_rows(table: Weight, piece: Weight, model: Model, reader: WeightReader) -> bool:
    assert piece.rows is not None
    one, other = (model.checkpoint.tensors[w.key] for w in (table, piece))
    if one.dtype != other.dtype:
        return False
    for start in range(*piece.rows, COMPARE_ROWS):
        rows = (start, min(start + COMPARE_ROWS, piece.rows[1]))
        shape = (rows[1] - rows[0], table.shape[1])
        read = []
        for info, weight in ((one, table), (other, piece)):
            out = torch.empty(shape, dtype=torch.float32)
            reader.read_into(out, info, name=weight.key, rows=rows)
            read.append(out)
        if not torch.equal(*read):
            return False
    return True
