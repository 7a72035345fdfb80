"""PaliGemma's prompts become token ids: pictures, the start token, the prompt, a line end."""

from collections.abc import Sequence

from vlmrun.errors import CheckpointError, UsageError
from vlmrun.models.companions import COPY
from vlmrun.models.model import Model
from vlmrun.tasks.tokenizer import check_said, check_vocabulary, encode
from vlmrun.tasks.vocabulary import read_vocabulary

# parts of a picture, as prompts and answers name them
PLACES = [f"<loc{i:04}>" for i in range(1024)] + [f"<seg{i:03}>" for i in range(128)]


class Prefix:
    """Token ids of a model's prompts, equal to those of its stock processor.

    vocabulary: what decoding needs to know of the tokenizer and its special tokens.

    Raises:
        CheckpointError: a file or a setting is missing, or the files contradict each other.
    """

    def __init__(self, model: Model, *, sampled: bool = False) -> None:
        """`sampled`: tokens are drawn, and the settings for that must be right, too."""
        # stock adds the places, too
        self.vocabulary = read_vocabulary(
            model, default="GemmaTokenizer", added=PLACES, sampled=sampled
        )
        if self.vocabulary.tokenizer.bos_token_id is None:
            raise CheckpointError("tokenizer_config.json names no bos_token", COPY)

    def input_ids(self, prompt: str, costs: Sequence[int], *, system: str = "") -> tuple[int, ...]:
        """Token ids of a prompt, after the image token as often as the pictures cost tokens.

        Raises:
            UsageError: the prompt holds the image token or is not Unicode, or there is a system
                prompt.
            CheckpointError: the tokenizer has tokens that the model lacks.
        """
        if system:
            raise UsageError(
                "PaliGemma takes no system prompt: it was trained on short tasks",
                "leave out --system; prompts are as `caption en` or `answer en What is this?`",
            )
        check_said("prompt", prompt, self.vocabulary.placeholder)
        tokenizer, placeholder = self.vocabulary.tokenizer, self.vocabulary.placeholder_id
        said = f"{tokenizer.bos_token}{prompt}\n"
        ids = encode(tokenizer, said, special_tokens=False)
        check_vocabulary(max(ids), self.vocabulary.size)
        return (*[placeholder] * sum(costs), *ids)
