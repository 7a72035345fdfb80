"""Replace the weight-carrying layers of a transformers model by ours, by exact type.

Exact, because subclasses behave differently: the pooling head's `out_proj` is a subclass of
Linear that is never called, Gemma's token embedding a subclass of Embedding with a scale.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from vlmrun.errors import UnsupportedModel
from vlmrun.nn.attention import CastMultiheadAttention
from vlmrun.nn.decoder import DecoderBlock
from vlmrun.nn.embedding import CastEmbedding, ClassEmbedding, PatchEmbedding
from vlmrun.nn.linear import CastLinear
from vlmrun.nn.mlp import CastMLP
from vlmrun.nn.norm import CastGemmaNorm, CastLayerNorm, CastRMSNorm
from vlmrun.nn.patches import FlatPatchEmbedding

Replace = Callable[[nn.Module, torch.dtype], nn.Module]


def swap_layers(root: nn.Module, compute_dtype: torch.dtype) -> None:
    """Replace every layer below `root` that carries weights.

    Raises:
        UnsupportedModel: a layer carries weights that no class of ours stands for.
    """
    for name, child in list(root.named_children()):
        kind = f"{type(child).__module__}.{type(child).__qualname__}"
        replace = REPLACEMENTS.get(kind)
        if replace is not None:
            setattr(root, name, replace(child, compute_dtype))
        elif any(True for _ in child.parameters(recurse=False)) and kind not in KEPT:
            raise UnsupportedModel(
                f"no layer of ours stands for {kind} ({name})",
                "install a version of transformers that vlmrun was tested with",
            )
        else:
            swap_layers(child, compute_dtype)


def _linear(layer: nn.Module, _: torch.dtype) -> nn.Module:
    assert isinstance(layer, nn.Linear)
    return CastLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)


def _layer_norm(layer: nn.Module, _: torch.dtype) -> nn.Module:
    assert isinstance(layer, nn.LayerNorm)
    return CastLayerNorm(layer.normalized_shape[0], eps=layer.eps)


def _decoder_block(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    swap_layers(layer, dtype)
    return DecoderBlock(layer)


def _mlp(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    swap_layers(layer, dtype)
    return CastMLP(layer)


def _rms_norm(layer: nn.Module, _: torch.dtype) -> nn.Module:
    return CastRMSNorm(layer.weight.shape[0], eps=layer.variance_epsilon)  # type: ignore[arg-type,index]


def _gemma_norm(layer: nn.Module, _: torch.dtype) -> nn.Module:
    return CastGemmaNorm(layer.weight.shape[0], eps=layer.eps)  # type: ignore[arg-type,index]


def _embedding(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    assert isinstance(layer, nn.Embedding)
    return CastEmbedding(layer.num_embeddings, layer.embedding_dim, compute_dtype=dtype)


def _scaled_embedding(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    assert isinstance(layer, nn.Embedding)
    return CastEmbedding(
        layer.num_embeddings,
        layer.embedding_dim,
        compute_dtype=dtype,
        scale=float(layer.scalar_embed_scale),  # type: ignore[arg-type]
    )


def _attention(layer: nn.Module, _: torch.dtype) -> nn.Module:
    assert isinstance(layer, nn.MultiheadAttention)
    return CastMultiheadAttention(layer.embed_dim, layer.num_heads)


def _patches(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    return PatchEmbedding(**_patch_shape(layer), dtype=dtype)


def _flat_patches(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    projection, positions = layer.patch_embedding, layer.position_embedding
    assert isinstance(projection, nn.Linear)
    assert isinstance(positions, nn.Embedding)
    return FlatPatchEmbedding(
        numbers=projection.in_features,
        width=projection.out_features,
        positions=positions.num_embeddings,
        dtype=dtype,
    )


def _class_and_patches(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    return ClassEmbedding(**_patch_shape(layer), dtype=dtype)


def _patch_shape(layer: nn.Module) -> dict[str, int]:
    convolution, positions = layer.patch_embedding, layer.position_embedding
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(positions, nn.Embedding)
    return {
        "channels": convolution.in_channels,
        "width": convolution.out_channels,
        "patch_size": int(convolution.kernel_size[0]),
        "positions": positions.num_embeddings,
    }


MODELS = "transformers.models"
# by name, because importing the classes would import every family's modelling code
REPLACEMENTS: Mapping[str, Replace] = {
    "torch.nn.modules.linear.Linear": _linear,
    "torch.nn.modules.normalization.LayerNorm": _layer_norm,
    "torch.nn.modules.sparse.Embedding": _embedding,
    "torch.nn.modules.activation.MultiheadAttention": _attention,
    f"{MODELS}.gemma.modeling_gemma.GemmaRMSNorm": _gemma_norm,
    f"{MODELS}.gemma.modeling_gemma.GemmaTextScaledWordEmbedding": _scaled_embedding,
    f"{MODELS}.gemma.modeling_gemma.GemmaDecoderLayer": _decoder_block,
    f"{MODELS}.gemma2.modeling_gemma2.Gemma2DecoderLayer": _decoder_block,
    f"{MODELS}.llama.modeling_llama.LlamaDecoderLayer": _decoder_block,
    f"{MODELS}.mistral.modeling_mistral.MistralDecoderLayer": _decoder_block,
    f"{MODELS}.qwen2.modeling_qwen2.Qwen2DecoderLayer": _decoder_block,
    f"{MODELS}.gemma2.modeling_gemma2.Gemma2RMSNorm": _gemma_norm,
    f"{MODELS}.gemma2.modeling_gemma2.Gemma2TextScaledWordEmbedding": _scaled_embedding,
    f"{MODELS}.llama.modeling_llama.LlamaRMSNorm": _rms_norm,
    f"{MODELS}.mistral.modeling_mistral.MistralRMSNorm": _rms_norm,
    f"{MODELS}.qwen2.modeling_qwen2.Qwen2RMSNorm": _rms_norm,
    f"{MODELS}.clip.modeling_clip.CLIPMLP": _mlp,
    f"{MODELS}.siglip.modeling_siglip.SiglipMLP": _mlp,
    f"{MODELS}.siglip2.modeling_siglip2.Siglip2MLP": _mlp,
    f"{MODELS}.clip.modeling_clip.CLIPVisionEmbeddings": _class_and_patches,
    f"{MODELS}.siglip.modeling_siglip.SiglipVisionEmbeddings": _patches,
    f"{MODELS}.siglip2.modeling_siglip2.Siglip2VisionEmbeddings": _flat_patches,
}
# modules with a parameter of their own that is cast where it is used: `image_newline`, `probe`
KEPT = frozenset(
    {
        f"{MODELS}.llava_next.modeling_llava_next.LlavaNextModel",
        f"{MODELS}.llava_onevision.modeling_llava_onevision.LlavaOnevisionModel",
        f"{MODELS}.siglip.modeling_siglip.SiglipMultiheadAttentionPoolingHead",
        f"{MODELS}.siglip2.modeling_siglip2.Siglip2MultiheadAttentionPoolingHead",
    }
)
