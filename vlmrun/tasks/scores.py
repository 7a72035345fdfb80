"""How well texts fit a picture, by the model's own measure (Zhai et al. 2023, arXiv:2303.15343).

Cosines of SigLIP are small, and so are its probabilities: 0.3 may be a perfect match. Unlike
CLIP's, probabilities of several texts do not add up to 1; each is that of its pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmrun.files.rows import Score
from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.models.model import Model
from vlmrun.tasks.embed import unit_length


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """Texts, their vectors [T, D] of unit length, and the two numbers that a model learns:
    probability = sigmoid(cosine * exp(scale) + bias)."""

    texts: tuple[str, ...]
    vectors: Tensor
    scale: float
    bias: float

    def scores(self, vector: Tensor) -> tuple[Score, ...]:
        """One for each text, of a picture's vector [D]; none where it is not finite."""
        if not torch.isfinite(vector).all():
            return ()
        cosines = self.vectors @ unit_length(vector)
        logits = cosines * torch.tensor(self.scale).exp() + self.bias
        numbers = zip(self.texts, cosines.tolist(), logits.sigmoid().tolist(), strict=True)
        return tuple(Score(text, cosine, probability) for text, cosine, probability in numbers)


def make_scorer(
    model: Model, entry: CachedModelWithPartialLoad, texts: Sequence[str], vectors: Sequence[Tensor]
) -> Scorer:
    """A scorer over texts whose vectors are known, its two numbers read from the checkpoint."""
    learned = {}
    for weight in model.layer("score").weights:
        number = torch.empty(1)
        entry.reader.read_into(number, model.checkpoint.tensors[weight.key], name=weight.key)
        learned[weight.path] = number.item()
    return Scorer(
        tuple(texts),
        unit_length(torch.stack(list(vectors))),
        learned["logit_scale"],
        learned["logit_bias"],
    )
