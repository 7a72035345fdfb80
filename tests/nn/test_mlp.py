"""A tower's two layers with the activation in the product: what the stock modules compute."""

import copy

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, Siglip2VisionConfig, SiglipVisionConfig
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.siglip.modeling_siglip import SiglipMLP
from transformers.models.siglip2.modeling_siglip2 import Siglip2MLP

from vlmrun.nn.kernels.products import product
from vlmrun.nn.linear import CastLinear, loops
from vlmrun.nn.mlp import CastMLP
from vlmrun.nn.swap import swap_layers

SIZES = {"hidden_size": 24, "intermediate_size": 52}
STOCK = {
    "siglip": lambda: SiglipMLP(SiglipVisionConfig(**SIZES)),
    "siglip2": lambda: Siglip2MLP(Siglip2VisionConfig(**SIZES)),
    "clip": lambda: CLIPMLP(CLIPVisionConfig(**SIZES)),
    "clip, gelu": lambda: CLIPMLP(CLIPVisionConfig(hidden_act="gelu", **SIZES)),
}


@pytest.mark.parametrize("kernel", ["loops", "PyTorch"])
@pytest.mark.parametrize("kind", STOCK)
def test_it_is_the_stock_module(kind: str, kernel: str) -> None:
    torch.manual_seed(0)
    stock = STOCK[kind]()
    with torch.inference_mode():
        for weight in stock.parameters():
            weight.copy_(torch.randn(weight.shape).bfloat16())
        ours = nn.Sequential(copy.deepcopy(stock))
        swap_layers(ours, torch.float32)
        assert isinstance(ours[0], CastMLP)
        assert (ours[0].gate is None) == (kind == "clip, gelu")
        named = dict(stock.named_parameters())
        for name, weight in ours[0].named_parameters():
            weight.data = named[name].bfloat16()
        if kernel == "loops":
            for layer in ours.modules():
                if isinstance(layer, CastLinear):
                    layer.kernels = {
                        (torch.bfloat16, torch.float32): ((float("inf"), loops(product)),)
                    }
        x = torch.randn(3, 7, 24)
        torch.testing.assert_close(ours(x), stock(x), atol=2e-5, rtol=2e-5)
