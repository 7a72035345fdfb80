"""Texts become what SigLIP's text tower takes."""

from collections.abc import Sequence

import torch
from tokenizers.normalizers import Lowercase

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.companions import COPY, read_optional, text_tokenizer
from vlmrun.models.model import Model
from vlmrun.models.open_clip import clean_text
from vlmrun.tasks.tokenizer import check_text, check_vocabulary, encode, load_tokenizer


class TextPreprocessor:
    """Token ids of texts, padded to the position limit.

    Raises:
        CheckpointError: a file or a setting is missing, or the files contradict each other.
        UnsupportedModel: the model is a vision tower alone.
    """

    def __init__(self, model: Model) -> None:
        folder, text = model.source.folder, model.architecture.text
        assert folder is not None
        if text is None:
            raise UnsupportedModel(
                f"{model.source.name} has no text tower", "embed texts with the whole model"
            )
        self._text = text
        self._lowers = False
        self._clean = model.config.get("tokenizer", {}).get("clean")  # open_clip's, else None
        self._tokenizer = load_tokenizer(folder, default=text_tokenizer(model))
        ends = self._encoded("a cat")[-1] == self._tokenizer.eos_token_id
        if not ends or self._tokenizer.pad_token_id is None:
            raise CheckpointError(
                "the tokenizer does not end and pad texts, as SigLIP's does",
                f"tokenizer_config.json is missing or of another model; {COPY}",
            )
        check_vocabulary(self._tokenizer.pad_token_id, text.vocabulary)
        # A tokenizer that lowers texts is left to do it its own way, one that is told not to
        # is obeyed. The generic one of SigLIP 2's files is neither (transformers#43054).
        settings = read_optional(folder, "tokenizer_config.json")
        cased = not settings.get("do_lower_case", True) or self._clean is not None
        stated = settings.get("padding_side")
        # open_clip pads as the tokenizer's class does, where no side is stated
        side = stated if self._clean is None else self._tokenizer.padding_side
        self._padded_left = side == "left"
        self._lowers = not cased and self._encoded("A CAT") != self._encoded("a cat")
        unsaid = {
            "padded on the right": side is None and self._tokenizer.padding_side == "left",
            "put in lower case": self._lowers and "do_lower_case" not in settings,
        }
        self._notes = [
            f"texts are {done}, as SigLIP's are: tokenizer_config.json does not say"
            for done, here in unsaid.items()
            if here
        ]

    def tokens(self, texts: Sequence[str]) -> tuple[torch.Tensor, tuple[str, ...]]:
        """Token ids [B, positions] int64, and a note for every text that is cut; the first time
        on what no file says, too.

        In lower case, ended by the end token, padded to the position limit and without a mask:
        the tower pools the last position, whatever it holds. On the right, where
        tokenizer_config.json names no side: SigLIP 2's class would pad on the left, and for
        open_clip's models does.

        Raises:
            UsageError: a text is not Unicode.
            CheckpointError: the tokenizer has tokens that the model lacks.
        """
        limit = self._text.positions
        rows = torch.full((len(texts), limit), self._tokenizer.pad_token_id, dtype=torch.int64)
        notes, self._notes = self._notes, []
        for text in texts:
            check_text("text", text)
        for row, text in zip(rows, texts, strict=True):
            ids = self._encoded(text)
            if len(ids) > limit:
                shown = text if len(text) < 40 else f"{text[:39]}…"
                notes.append(f"text {shown!r} has {len(ids)} tokens and is cut to {limit}")
                ids = self._encoded(text, limit)
            check_vocabulary(max(ids), self._text.vocabulary)
            start = limit - len(ids) if self._padded_left else 0
            row[start : start + len(ids)] = torch.tensor(ids)
        return rows, tuple(notes)

    def _encoded(self, text: str, limit: int | None = None) -> list[int]:
        if self._clean is not None:
            text = clean_text(text, self._clean)
        if self._lowers:
            # As transformers' Siglip2Tokenizer does; Python's own differs on a few letters.
            text = Lowercase().normalize_str(text)
        return encode(self._tokenizer, text, limit=limit)
