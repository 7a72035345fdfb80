"""Layers are replaced by their exact type, or the model is refused."""

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

from vlmrun.errors import UnsupportedModel
from vlmrun.models.towers import filed_shapes
from vlmrun.nn.attention import CastMultiheadAttention
from vlmrun.nn.embedding import CastEmbedding, CastPatches, PatchEmbedding
from vlmrun.nn.linear import CastLinear
from vlmrun.nn.norm import CastGemmaNorm, CastLayerNorm, CastRMSNorm
from vlmrun.nn.swap import swap_layers

OURS = {CastLinear, CastEmbedding, CastLayerNorm, CastRMSNorm, CastMultiheadAttention}
OURS |= {PatchEmbedding, CastPatches}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1} | {
    "num_attention_heads": 2,
    "image_size": 14,
    "patch_size": 7,
}


class ScaledEmbedding(nn.Embedding):
    """As Gemma's: a subclass that does more than look rows up."""

    def forward(self, ids: Tensor) -> Tensor:
        return 8 * super().forward(ids)


class ShiftedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class OwnWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def unfused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The pooling head's state with its fused input projection as three."""
    parts = dict(state)
    for kind in ("weight", "bias"):
        thirds = parts.pop(f"attention.in_proj_{kind}").chunk(3)
        parts |= {f"attention.{p}_proj.{kind}": t for p, t in zip("qkv", thirds, strict=True)}
    return parts


def swapped(root: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    swap_layers(root, dtype)
    return root


def test_known_layers_are_replaced_in_place() -> None:
    root = nn.Sequential(
        nn.Linear(4, 3, bias=False),
        nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.LayerNorm(3, eps=0.25)),
        nn.Embedding(5, 3),
    )
    shapes = {name: value.shape for name, value in root.named_parameters()}
    swapped(root, torch.bfloat16)
    assert {name: value.shape for name, value in root.named_parameters()} == shapes
    kinds = [type(module) for module in (root[0], *root[1], root[2])]
    assert kinds == [CastLinear, CastLinear, nn.GELU, CastLayerNorm, CastEmbedding]
    assert root[1][2].eps == 0.25
    assert root[2].compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    "layer",
    [ScaledEmbedding(5, 3), ShiftedLinear(3, 3), OwnWeight(), nn.Conv2d(1, 1, 2), nn.RMSNorm(3)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_of_another_type_is_refused(layer: nn.Module) -> None:
    root = nn.ModuleDict({"inner": nn.ModuleDict({"odd": layer})})
    with pytest.raises(UnsupportedModel, match=rf"{type(layer).__name__} \(odd\)"):
        swap_layers(root, torch.float32)
    assert root["inner"]["odd"] is layer


@torch.no_grad()
def test_the_pooling_head_stays_one_layer() -> None:
    """Its `out_proj` is a subclass of Linear that stock reads and never calls."""
    config = transformers.SiglipVisionConfig(**VISION)
    stock = SiglipMultiheadAttentionPoolingHead(config)
    source = torch.Generator().manual_seed(1)
    for value in stock.parameters():
        value.copy_(torch.randn(value.shape, generator=source))
    out_proj = type(stock.attention.out_proj)
    assert out_proj is not nn.Linear
    assert issubclass(out_proj, nn.Linear)
    ours = SiglipMultiheadAttentionPoolingHead(config)
    swap_layers(ours, torch.float32)
    assert type(ours.attention) is CastMultiheadAttention
    ours.load_state_dict(unfused(stock.state_dict()))
    states = torch.randn(2, 4, 16, generator=source)
    torch.testing.assert_close(ours(states), stock(states), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gemma", "gemma2"])
def test_gemmas_subclasses_keep_what_they_add(kind: str) -> None:
    """The embedding's scale and the norm's 1 + weight, by the stock class's own numbers."""
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20}
    config = transformers.CONFIG_MAPPING[kind](**text, rms_norm_eps=0.25)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
        swap_layers(model, torch.bfloat16)
    assert (model.embed_tokens.scale, model.embed_tokens.compute_dtype) == (4.0, torch.bfloat16)
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    assert len(norms) == (3 if kind == "gemma" else 5)
    assert {(type(module), module.eps) for module in norms} == {(CastGemmaNorm, 0.25)}


def test_a_lone_out_proj_is_refused() -> None:
    root = nn.Sequential(nn.MultiheadAttention(4, 2).out_proj)
    with pytest.raises(UnsupportedModel, match="NonDynamicallyQuantizableLinear"):
        swap_layers(root, torch.float32)


@pytest.mark.parametrize("name", ["SiglipModel", "LlavaOnevisionForConditionalGeneration"])
def test_every_parameter_of_a_family_is_ours_or_its_root(name: str) -> None:
    """Paths and shapes stay; parameters on modules that are no layer are the four known."""
    vision = transformers.SiglipVisionConfig(**VISION)
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "vocab_size": 20}
    if name == "SiglipModel":
        config = transformers.SiglipConfig(
            vision_config=vision.to_dict(),
            text_config={**text, "bos_token_id": 2, "eos_token_id": 1},
        )
    else:
        qwen = {**text, "model_type": "qwen2", "num_key_value_heads": 1}
        config = transformers.LlavaOnevisionConfig(
            vision_config=vision.to_dict(), text_config=qwen, image_token_index=5
        )
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
        shapes = {path: tuple(value.shape) for path, value in model.named_parameters()}
        swap_layers(model, torch.float32)
    found = {path: tuple(value.shape) for path, value in model.named_parameters()}
    assert filed_shapes(found) == shapes
    loose = {
        path for path in found if type(model.get_submodule(path.rpartition(".")[0])) not in OURS
    }
    assert {path.rpartition(".")[2] for path in loose} <= {
        "logit_scale",
        "logit_bias",
        "probe",
        "image_newline",
    }
