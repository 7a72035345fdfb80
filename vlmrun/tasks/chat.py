"""A chat about pictures becomes token ids, as the checkpoint's own template writes it."""

from collections.abc import Callable, Sequence

from jinja2 import TemplateError

from vlmrun.errors import CheckpointError, UsageError
from vlmrun.models.companions import COPY, OTHER_MODEL, read_template
from vlmrun.models.model import Model
from vlmrun.tasks.processor_files import one_line
from vlmrun.tasks.tokenizer import check_said, check_vocabulary, encode
from vlmrun.tasks.vocabulary import read_vocabulary

Form = Callable[[str, int, str], object]  # (image token, pictures, prompt) -> what a user says


def by_parts(image_token: str, pictures: int, prompt: str) -> object:
    """As templates of models that see take it."""
    return [*[{"type": "image"}] * pictures, {"type": "text", "text": prompt}]


def as_text(image_token: str, pictures: int, prompt: str) -> object:
    """As JoyCaption's template takes it, which puts the picture before the prompt itself."""
    return prompt


def as_marked_text(image_token: str, pictures: int, prompt: str) -> object:
    """As templates of language models take it."""
    return f"{image_token}\n" * pictures + prompt


FORMS: tuple[Form, ...] = (by_parts, as_text, as_marked_text)


class Chat:
    """Token ids of a model's chats, equal to those of its stock processor.

    vocabulary: what decoding needs to know of the tokenizer and its special tokens.

    Raises:
        CheckpointError: a file or a setting is missing, or the files contradict each other.
    """

    def __init__(self, model: Model, *, sampled: bool = False) -> None:
        """`sampled`: tokens are drawn, and the settings for that must be right, too."""
        self.vocabulary = read_vocabulary(model, default="TokenizersBackend", sampled=sampled)
        self._template = read_template(model)
        self._form = self._choose_form()

    def input_ids(self, prompt: str, costs: Sequence[int], *, system: str = "") -> tuple[int, ...]:
        """Token ids of a chat, the image token repeated as often as each picture costs tokens.

        Raises:
            UsageError: a text holds the image token or is not Unicode, or the model takes no
                system prompt.
            CheckpointError: the chat template fails or leaves pictures out, or the tokenizer
                has tokens that the model lacks.
        """
        rendered = self._rendered(len(costs), prompt, system)
        tokenizer, placeholder = self.vocabulary.tokenizer, self.vocabulary.placeholder_id
        # As stock processors do: a template may write the start token, else the tokenizer adds it.
        start = tokenizer.bos_token
        started = start is not None and rendered.startswith(start)
        ids = encode(tokenizer, rendered, special_tokens=not started)
        places = ids.count(placeholder)
        if places != len(costs):
            raise CheckpointError(
                f"the chat template makes {places} places for {len(costs)} pictures", OTHER_MODEL
            )
        check_vocabulary(max(ids), self.vocabulary.size)
        expanded: list[int] = []
        left = iter(costs)
        for token in ids:
            expanded += [token] * (next(left) if token == placeholder else 1)
        assert expanded.count(placeholder) == sum(costs)
        return tuple(expanded)

    def _rendered(self, pictures: int, prompt: str, system: str) -> str:
        """The chat up to the start of the answer, with one image token per picture."""
        for what, text in ("prompt", prompt), ("system prompt", system):
            check_said(what, text, self.vocabulary.placeholder)
        try:
            rendered = self._render(self._form, pictures, prompt, system)
        except (TemplateError, TypeError, ValueError) as error:
            if system:
                raise _no_system_prompt(one_line(error)) from error
            raise CheckpointError(f"the chat template fails: {one_line(error)}", COPY) from error
        if system.strip() not in rendered:
            raise _no_system_prompt("it is left out")
        return rendered

    def _render(self, form: Form, pictures: int, prompt: str, system: str) -> str:
        asked = form(self.vocabulary.placeholder, pictures, prompt)
        messages = [{"role": "user", "content": asked}]
        if system:
            told = [{"type": "text", "text": system}] if form is by_parts else system
            messages.insert(0, {"role": "system", "content": told})
        rendered = self.vocabulary.tokenizer.apply_chat_template(
            messages,
            chat_template=self._template,
            add_generation_prompt=True,
            tokenize=False,
            image_token=self.vocabulary.placeholder,
        )
        return str(rendered)

    def _choose_form(self) -> Form:
        """The first form in which the template makes one place for one picture."""
        for form in FORMS:
            try:
                if self._render(form, 1, "?", "").count(self.vocabulary.placeholder) == 1:
                    return form
            except (TemplateError, TypeError, ValueError):
                continue
        return by_parts  # its fault is told when the first picture is asked about


def _no_system_prompt(why: str) -> UsageError:
    return UsageError(
        f"the model's chat template takes no system prompt: {why}",
        "leave out --system, or say it in the prompt",
    )
