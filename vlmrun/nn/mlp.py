"""The two layers of a vision tower's or text tower's block, and what lies between them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vlmrun.nn.linear import CastLinear, Gate

GATES: Mapping[str, Gate] = {"GELUTanh": "gelu_tanh", "QuickGELUActivation": "quick_gelu"}


class CastMLP(nn.Module):
    """transformers' SiglipMLP, Siglip2MLP and CLIPMLP, with the activation computed where the first
    product is, while its numbers are at hand."""

    fc1: Any
    fc2: Any
    activation_fn: Any

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        for name, child in stock.named_children():
            self.add_module(name, child)
        kind = type(stock.activation_fn).__name__
        self.gate = GATES.get(kind) if type(self.fc1) is CastLinear else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D], gives the same."""
        if self.gate is None:
            made: Tensor = self.fc2(self.activation_fn(self.fc1(hidden_states)))
        else:
            made = self.fc2(self.fc1(hidden_states, self.gate))
        return made
