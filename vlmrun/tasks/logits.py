"""What changes a row's logits before a token is chosen from them.

Made by transformers' own code, so that what a checkpoint's generation_config.json sets means what
it means to `generate()`.
"""

import copy
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerationMixin

from vlmrun.errors import CheckpointError
from vlmrun.job import Generation
from vlmrun.models.companions import COPY


class Stock(GenerationMixin):  # type: ignore[misc]
    """What of `generate()` knows the settings and their order; there is no model behind it."""

    config = PreTrainedConfig()


def make_processors(
    settings: GenerationConfig,
    prompt: Tensor,
    *,
    stop_ids: Collection[int],
    generation: Generation,
) -> LogitsProcessorList:
    """The checkpoint's settings, which `generate()` applies to greedy search too, then the job's
    sampling, for the row that begins with `prompt` [1, T] and no other: many count its tokens.
    """
    own, length = copy.copy(settings), prompt.shape[1]
    own.max_length = length + generation.max_new_tokens
    if own.min_new_tokens is not None:
        own.min_length = own.min_new_tokens + length
    own.do_sample, own.num_beams = generation.temperature > 0, 1
    for name in ("temperature", "top_k", "top_p"):
        setattr(own, name, getattr(generation, name))
    own.guidance_scale = own.watermarking_config = None  # need the model; told by a note
    own._eos_token_tensor = torch.tensor(sorted(stop_ids))
    made: LogitsProcessorList = Stock()._get_logits_processor(
        own, input_ids_seq_length=length, encoder_input_ids=prompt, device="cpu"
    )
    return made


def check_settings(
    settings: GenerationConfig, *, stop_ids: Collection[int], vocabulary: int
) -> None:
    """Try a checkpoint's settings on a row of one token and one to come.

    Raises:
        CheckpointError: one is not of its type, out of range, or names no token of the model's.
    """
    prompt, logits = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, vocabulary)
    one = Generation(max_new_tokens=1)
    try:
        make_processors(settings, prompt, stop_ids=stop_ids, generation=one)(prompt, logits)
    except Exception as error:  # every setting is checked by other code, in other ways
        reason = " ".join(f"{error}".split()) or type(error).__name__
        raise CheckpointError(f"generation_config.json: {reason}", COPY) from error


def processed(
    processors: Sequence[LogitsProcessorList], ids: Tensor, logits: Tensor, starts: Sequence[int]
) -> Tensor:
    """Logits [B, V] after every row's own processors; a row's padding, before `starts`, is no
    token of it."""
    if not any(processors):
        return logits
    rows = [
        chain(ids[i : i + 1, start:], logits[i : i + 1])
        for i, (chain, start) in enumerate(zip(processors, starts, strict=True))
    ]
    return torch.cat(rows)
