"""What asking a model, and reading its answer, needs to know of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from vlmrun.models.model import Model
from vlmrun.tasks.logits import read_settings
from vlmrun.tasks.processor_files import read_image_token, read_stop_ids
from vlmrun.tasks.tokenizer import check_vocabulary, load_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, its special tokens, and the checkpoint's settings of generation.

    size: tokens that the model has; placeholder: what stands for a token of a picture.
    """

    tokenizer: PreTrainedTokenizerBase
    size: int
    placeholder: str
    placeholder_id: int
    pad_id: int
    stop_ids: frozenset[int]
    settings: GenerationConfig


def read_vocabulary(
    model: Model, *, default: str, added: Sequence[str] = (), sampled: bool = False
) -> Vocabulary:
    """Read a folder's tokenizer, of the class `default` where it names none, with tokens `added`
    where it lacks them, and the settings of generation, those of sampling where it is `sampled`.

    Raises:
        CheckpointError: a file or a setting is missing, or the files contradict each other.
    """
    folder, decoder = model.source.folder, model.architecture.decoder
    assert folder is not None
    assert decoder is not None
    tokenizer = load_tokenizer(folder, default=default)
    tokenizer.add_tokens(list(added))
    placeholder, placeholder_id = read_image_token(model, tokenizer)
    stop_ids = read_stop_ids(model, tokenizer)
    pad = tokenizer.pad_token_id
    pad_id = min(stop_ids) if pad is None else int(pad)
    check_vocabulary(pad_id, decoder.vocabulary)
    settings = read_settings(
        model, stop_ids=stop_ids, placeholder_id=placeholder_id, sampled=sampled
    )
    return Vocabulary(
        tokenizer, decoder.vocabulary, placeholder, placeholder_id, pad_id, stop_ids, settings
    )
