"""The decode loop: prefill, then one step per token over preallocated keys and values.

Gives the tokens that transformers' `generate()` gives in float32. Ours, because a step must be
repeatable and phases, placement and batches must be decided outside of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import masking_utils

from vlmrun.job import Generation
from vlmrun.memory.cached_model import CachedModelWithPartialLoad
from vlmrun.models.shapes import Decoder
from vlmrun.nn.kv import KVCache
from vlmrun.nn.parallel import from_first
from vlmrun.tasks.logits import make_processors, processed
from vlmrun.tasks.tokenizer import decode as text_of
from vlmrun.tasks.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One prompt with its pictures: token ids with a placeholder per picture token, and the
    features [T, D] that take the placeholders' places."""

    input_ids: tuple[int, ...]
    features: Tensor | None
    seed: int = 0


@dataclass(slots=True)
class Decoded:
    """What came out of one row; `finite` is false where the arithmetic overflowed."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Literal["stop", "length"] = "length"
    done: bool = False
    finite: bool = True


@torch.inference_mode()
def decode(
    model: CachedModelWithPartialLoad,
    shape: Decoder,
    rows: Sequence[DecodeRow],
    *,
    vocabulary: Vocabulary,
    generation: Generation,
) -> list[Decoded]:
    """Generate a continuation for every row of a batch, in the order given.

    Rows of different length are padded on the left. A row ends at a stop token, a stop string
    or after `max_new_tokens`; the batch ends when its last row does.
    """
    ids, mask = left_padded(rows, vocabulary.pad_id)
    decoded = [Decoded() for _ in rows]
    generators = [torch.Generator().manual_seed(generation.seed + row.seed) for row in rows]
    starts = (1 - mask).sum(dim=1).tolist()  # where each row's prompt begins
    processors = [
        make_processors(
            vocabulary.settings,
            ids[i : i + 1, start:],
            stop_ids=vocabulary.stop_ids,
            generation=generation,
        )
        for i, start in enumerate(starts)
    ]
    with model.use("decode") as module:
        embeds = embed_prompts(module, rows, ids, vocabulary.placeholder_id)
        embeds = embeds.to(model.compute_device)
        steps = Steps(model, module, shape, embeds, mask, generation.max_new_tokens)
        logits = steps.prefill(embeds)
        for count in range(1, generation.max_new_tokens + 1):
            end_overflowed(decoded, logits)
            scores = processed(processors, ids, logits, starts)
            chosen = from_first(choose_tokens(scores, generation, generators))  # [B]
            for row, token in zip(decoded, chosen.tolist(), strict=True):
                take_token(row, token, vocabulary, generation.stop)
            if all(row.done for row in decoded) or count == generation.max_new_tokens:
                break
            ids = torch.cat([ids, chosen[:, None]], dim=1)
            logits = steps.step(chosen)
    for row in decoded:
        if not row.done:
            row.text = text_of(vocabulary.tokenizer, row.tokens)
    return decoded


class Steps:
    """A decoder's forward passes over one batch. Each may be repeated until it succeeds."""

    def __init__(
        self,
        model: CachedModelWithPartialLoad,
        module: nn.Module,
        shape: Decoder,
        embeds: Tensor,
        mask: Tensor,
        new_tokens: int,
    ) -> None:
        batch, length = mask.shape
        kv_shape = (batch, shape.kv_heads, length + new_tokens, shape.head_dim)
        self._decoder = module.get_submodule("model.language_model")
        self._head = module.get_submodule("lm_head")
        self._cache = KVCache(
            shape.layers,
            kv_shape,
            dtype=embeds.dtype,
            device=embeds.device,
            starts=(1 - mask).sum(dim=1),
        )
        self._first = shape.first_position
        self._prefix = shape.prefix
        text = module.config.get_text_config()  # type: ignore[operator,union-attr]
        # PaliGemma bounds its logits, and no other family does, whatever its decoder asks for
        self._cap = getattr(text, "final_logit_softcapping", None) if shape.prefix else None
        self._mask = mask.to(model.compute_device)
        self._padded = not bool(mask.all())
        self._lengths = self._mask.sum(dim=1)  # [B] tokens of each row so far

    def prefill(self, embeds: Tensor) -> Tensor:
        """Run the prompts [B, T, D]; returns the last position's logits [B, V] in float32."""
        positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0) + self._first  # [B, T]
        seen = self._both_ways(embeds, positions) if self._prefix else self._padding(self._mask)
        logits = self._forward(embeds, positions, seen)
        self._cache.advance(embeds.shape[1])
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Run one token per row [B]; returns the next logits [B, V] in float32."""
        embeds = self._decoder.embed_tokens(tokens[:, None].to(self._mask.device))  # type: ignore[operator]
        mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        positions = self._lengths[:, None] + self._first
        logits = self._forward(embeds, positions, self._padding(mask))
        self._cache.advance(1)
        self._mask, self._lengths = mask, self._lengths + 1
        return logits

    def _forward(self, embeds: Tensor, positions: Tensor, seen: Any) -> Tensor:
        out = self._decoder(
            attention_mask=seen,
            position_ids=positions,
            cache=self._cache,
            inputs_embeds=embeds,
            use_cache=True,
            return_dict=True,
        )
        logits: Tensor = self._head(out.last_hidden_state[:, -1])
        return capped(logits, self._cap).float().cpu()

    def _padding(self, mask: Tensor) -> Tensor | None:
        return mask if self._padded else None

    def _both_ways(self, embeds: Tensor, positions: Tensor) -> Any:
        """The decoder's masks of a prompt whose tokens all see each other, in the form that its
        attention takes; the tokens after it see what came before, as everywhere."""
        whole = torch.zeros_like(self._mask)  # one block, numbered 0
        return masking_utils.create_masks_for_generate(
            self._decoder.config,
            embeds,
            self._mask,
            self._cache,
            positions,
            block_sequence_ids=whole,
        )


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Gemma 2's bound on logits. What is not finite stays so: tanh would hide an overflow."""
    if cap is None:
        return logits
    return torch.where(logits.isfinite(), torch.tanh(logits / cap) * cap, logits)


def left_padded(rows: Sequence[DecodeRow], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, [B, T] int64 each, padded on the left."""
    length = max(len(row.input_ids) for row in rows)
    ids = torch.full((len(rows), length), pad_id)
    mask = torch.zeros((len(rows), length), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, length - len(row.input_ids) :] = torch.tensor(row.input_ids)
        mask[i, length - len(row.input_ids) :] = 1
    return ids, mask


def embed_prompts(
    module: nn.Module, rows: Sequence[DecodeRow], ids: Tensor, placeholder_id: int
) -> Tensor:
    """Token embeddings [B, T, D] with every picture's features in the placeholders' places. The
    placeholder itself may lie beyond the table."""
    table = module.get_submodule("model.language_model.embed_tokens")
    embeds: Tensor = table(ids.masked_fill(ids == placeholder_id, 0))
    for i, row in enumerate(rows):
        places = ids[i] == placeholder_id
        if row.features is not None:
            assert int(places.sum()) == row.features.shape[0]
            embeds[i, places] = row.features.to(embeds.dtype).to(embeds.device)
    return embeds


def choose_tokens(
    scores: Tensor, generation: Generation, generators: Sequence[torch.Generator]
) -> Tensor:
    """The best token of every row, or one drawn by the row's own generator: [B, V] -> [B]."""
    if generation.temperature == 0:
        return scores.argmax(dim=-1)
    chances = scores.softmax(dim=-1)
    drawn = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(chances, generators, strict=True)
    ]
    return torch.cat(drawn)


def end_overflowed(decoded: Sequence[Decoded], logits: Tensor) -> None:
    """End rows whose logits [B, V] are not finite; the others go on."""
    for row, finite in zip(decoded, torch.isfinite(logits).all(dim=-1).tolist(), strict=True):
        if not finite and not row.done:
            row.done, row.finite = True, False
    logits.nan_to_num_(nan=0.0)


def take_token(row: Decoded, token: int, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
    """Add a token to a row that is not done, and end the row where it should end."""
    if row.done:
        return
    row.tokens.append(token)
    if token in vocabulary.stop_ids:
        row.done, row.finish = True, "stop"
        row.text = text_of(vocabulary.tokenizer, row.tokens)
    elif stop:
        text = text_of(vocabulary.tokenizer, row.tokens)
        ends = [at for at in (text.find(s) for s in stop) if at >= 0]
        if ends:
            row.done, row.finish, row.text = True, "stop", text[: min(ends)]
