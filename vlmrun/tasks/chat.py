"""A chat about pictures becomes token ids, as the checkpoint's own template writes it."""

from collections.abc import Sequence

from jinja2 import TemplateError

from vlmrun.errors import CheckpointError, UsageError
from vlmrun.models.companions import COPY, OTHER_MODEL
from vlmrun.models.model import Model
from vlmrun.tasks.decode import Vocabulary
from vlmrun.tasks.processor_files import (
    check_text,
    check_vocabulary,
    load_tokenizer,
    one_line,
    read_generation_settings,
    read_image_token,
    read_stop_ids,
    read_template,
)


class Chat:
    """Token ids of a model's chats, equal to those of its stock processor.

    vocabulary: what decoding needs to know of the tokenizer and its special tokens.

    Raises:
        CheckpointError: a file or a setting is missing, or the files contradict each other.
    """

    def __init__(self, model: Model) -> None:
        folder, decoder = model.source.folder, model.architecture.decoder
        assert folder is not None
        assert decoder is not None
        self._entries = decoder.vocabulary
        tokenizer = load_tokenizer(folder, default="TokenizersBackend")
        self._template = read_template(model, tokenizer)
        self._image_token, image_token_id = read_image_token(model, tokenizer)
        stop_ids = read_stop_ids(model, tokenizer)
        pad = tokenizer.pad_token_id
        pad_id = min(stop_ids) if pad is None else int(pad)
        check_vocabulary(pad_id, decoder.vocabulary)
        settings = read_generation_settings(folder)
        self.vocabulary = Vocabulary(tokenizer, image_token_id, pad_id, stop_ids, settings)

    def input_ids(self, prompt: str, costs: Sequence[int], *, system: str = "") -> tuple[int, ...]:
        """Token ids of a chat, the image token repeated as often as each picture costs tokens.

        Raises:
            UsageError: a text holds the image token or is not Unicode, or the model takes no
                system prompt.
            CheckpointError: the chat template fails or leaves pictures out, or the tokenizer
                has tokens that the model lacks.
        """
        rendered = self._rendered(len(costs), prompt, system)
        # The template writes the special tokens; `verbose` is a remark on long sequences.
        tokenizer, placeholder = self.vocabulary.tokenizer, self.vocabulary.placeholder_id
        ids = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
        places = ids.count(placeholder)
        if places != len(costs):
            raise CheckpointError(
                f"the chat template makes {places} places for {len(costs)} pictures", OTHER_MODEL
            )
        check_vocabulary(max(ids), self._entries)
        expanded: list[int] = []
        left = iter(costs)
        for token in ids:
            expanded += [token] * (next(left) if token == placeholder else 1)
        assert expanded.count(placeholder) == sum(costs)
        return tuple(expanded)

    def _rendered(self, pictures: int, prompt: str, system: str) -> str:
        """The chat up to the start of the answer, with one image token per picture."""
        for what, text in ("prompt", prompt), ("system prompt", system):
            check_text(what, text)
            if self._image_token in text:
                raise UsageError(
                    f"the {what} holds {self._image_token}, which stands for a picture",
                    "leave it out; pictures are put before the prompt",
                )
        said: list[dict[str, str]] = [{"type": "image"}] * pictures
        messages = [{"role": "user", "content": [*said, {"type": "text", "text": prompt}]}]
        if system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        try:
            rendered = self.vocabulary.tokenizer.apply_chat_template(
                messages, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            if system:
                raise _no_system_prompt(one_line(error)) from error
            raise CheckpointError(f"the chat template fails: {one_line(error)}", COPY) from error
        if system.strip() not in rendered:
            raise _no_system_prompt("it is left out")
        return str(rendered)


def _no_system_prompt(why: str) -> UsageError:
    return UsageError(
        f"the model's chat template takes no system prompt: {why}",
        "leave out --system, or say it in the prompt",
    )
