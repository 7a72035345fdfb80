"""What changes a row's logits before a token is chosen from them.

Made by transformers' own code, so that what a checkpoint's generation_config.json sets means what
it means to `generate()`.
"""

import copy
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerationMixin

from vlmrun.errors import CheckpointError
from vlmrun.job import Generation
from vlmrun.models.companions import COPY, read_generation
from vlmrun.models.model import Model
from vlmrun.models.quiet import quiet_transformers


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
    longest = own.encoder_no_repeat_ngram_size
    if isinstance(longest, int) and longest > length:  # in no prompt; stock lists so many parts
        own.encoder_no_repeat_ngram_size = None
    own.guidance_scale = own.watermarking_config = None  # need the model; told by a note
    own._eos_token_tensor = torch.tensor(sorted(stop_ids))
    made: LogitsProcessorList = Stock()._get_logits_processor(
        own, input_ids_seq_length=length, encoder_input_ids=prompt, device="cpu"
    )
    return made


def read_settings(
    model: Model, *, stop_ids: Collection[int], placeholder_id: int, sampled: bool
) -> GenerationConfig:
    """A checkpoint's settings of generation, tried on a prompt of one token of a picture and two
    tokens after it; sampling's where tokens are drawn, as greedy search leaves them alone.

    Raises:
        CheckpointError: one is not of its type, out of range, or names no token of the model's.
    """
    file, values = read_generation(model)
    decoder = model.architecture.decoder
    assert decoder is not None
    prompt, logits = torch.tensor([[placeholder_id]]), torch.zeros(1, decoder.vocabulary)
    two = Generation(max_new_tokens=2, temperature=1.0 if sampled else 0.0)

    def attempt(values: Mapping[str, Any]) -> GenerationConfig:
        kept = {"_from_model_config": True} if file == "config.json" else {}
        settings: GenerationConfig = GenerationConfig.from_dict({**values, **kept})
        for each in (settings, penalised_at_once(settings)):
            chain = make_processors(each, prompt, stop_ids=stop_ids, generation=two)
            chain(prompt, logits.clone())
            chain(torch.cat([prompt, prompt], dim=1), logits.clone())
        return settings

    with quiet_transformers():
        try:
            return attempt(values)
        except Exception as error:  # every setting is checked by other code, in other ways
            raise refused(error, f"{file}: {culprit(values, attempt)}") from error


def penalised_at_once(settings: GenerationConfig) -> GenerationConfig:
    """The settings, with the penalty on length from the first token on."""
    own, decay = copy.copy(settings), settings.exponential_decay_length_penalty
    if decay is not None:
        own.exponential_decay_length_penalty = (0, decay[1])
    return own


def culprit(values: Mapping[str, Any], attempt: Callable[[Mapping[str, Any]], object]) -> str:
    """The first setting that fails alone, and its value; foreign errors seldom name it."""
    for name, value in values.items():
        try:
            attempt({name: value})
        except Exception:
            return f"{name} is {reprlib.repr(value)}: "
    return ""


def refused(error: Exception, where: str) -> CheckpointError:
    """A foreign error about a setting, on one line."""
    reason = " ".join(f"{error}".split()) or type(error).__name__
    return CheckpointError(f"{where}{reason}", COPY)


def processed(
    processors: Sequence[LogitsProcessorList], ids: Tensor, logits: Tensor, starts: Sequence[int]
) -> Tensor:
    """Logits [B, V] after every row's own processors; a row's padding, before `starts`, is no
    token of it.

    Raises:
        CheckpointError: a setting fails that did not when it was tried, as a penalty on length
            that grows beyond all numbers.
    """
    if not any(processors):
        return logits
    try:
        rows = [
            chain(ids[i : i + 1, start:], logits[i : i + 1])
            for i, (chain, start) in enumerate(zip(processors, starts, strict=True))
        ]
    except Exception as error:
        raise refused(error, "the checkpoint's settings of generation: ") from error
    return torch.cat(rows)
