"""Texts become what SigLIP's text tower takes."""

import warnings
from collections.abc import Sequence

import torch
from tokenizers.normalizers import Lowercase

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.companions import COPY, read_optional, text_tokenizer
from vlmrun.models.model import Model
from vlmrun.models.open_clip import clean_text
from vlmrun.tasks.processor_files import check_text, check_vocabulary, load_tokenizer


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
        ends = self._encoded(["a cat"])[0][-1] == self._tokenizer.eos_token_id
        if not ends or self._tokenizer.pad_token_id is None:
            raise CheckpointError(
                "the tokenizer does not end and pad texts, as SigLIP's does",
                f"tokenizer_config.json is missing or of another model; {COPY}",
            )
        check_vocabulary(self._tokenizer.pad_token_id, text.vocabulary)
        # A tokenizer that lowers texts is left to do it its own way, one that is told not to
        # is obeyed. The generic one of SigLIP 2's files is neither (transformers#43054).
        cased = read_optional(folder, "tokenizer_config.json").get("do_lower_case") is False
        cased = cased or self._clean is not None
        self._lowers = not cased and self._encoded(["A CAT"]) != self._encoded(["a cat"])

    def tokens(self, texts: Sequence[str]) -> tuple[torch.Tensor, tuple[str, ...]]:
        """Token ids [B, positions] int64, and a note for every text that is cut.

        In lower case, ended by the end token, padded on the right to the position limit and
        without a mask: the tower pools the last position, whatever it holds.

        Raises:
            UsageError: a text is not Unicode.
            CheckpointError: the tokenizer has tokens that the model lacks.
        """
        limit = self._text.positions
        rows = torch.full((len(texts), limit), self._tokenizer.pad_token_id, dtype=torch.int64)
        notes = []
        for text in texts:
            check_text("text", text)
        for at, ids in enumerate(self._encoded(texts)):
            if len(ids) > limit:
                start = texts[at] if len(texts[at]) < 40 else f"{texts[at][:39]}…"
                notes.append(f"text {start!r} has {len(ids)} tokens and is cut to {limit}")
                ids = ids[: limit - 1] + ids[-1:]
            check_vocabulary(max(ids), self._text.vocabulary)
            rows[at, : len(ids)] = torch.tensor(ids)
        return rows, tuple(notes)

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._clean is not None:
            texts = [clean_text(text, self._clean) for text in texts]
        if self._lowers:
            # As transformers' Siglip2Tokenizer does; Python's own differs on a few letters.
            texts = [Lowercase().normalize_str(text) for text in texts]
        with warnings.catch_warnings():  # SigLIP's tokenizer does on a text that ends in </s>
            warnings.simplefilter("ignore")
            encoded = self._tokenizer(list(texts), verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]
