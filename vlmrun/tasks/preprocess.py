"""Pictures and texts become the tensors that towers and decoders take, on the CPU.

The image processors are named here, so that pixels never depend on what else is installed.
"""

import warnings
from collections.abc import Iterator, Sequence

import torch
from jinja2 import TemplateError
from PIL import Image
from tokenizers.normalizers import Lowercase
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from vlmrun.errors import CheckpointError, UnsupportedModel, UsageError
from vlmrun.models.companions import COPY, OTHER_MODEL, check_tiling, read_optional
from vlmrun.models.family import Detail
from vlmrun.models.llava import fitted_resolution
from vlmrun.models.model import Model
from vlmrun.tasks.caption import Pictures
from vlmrun.tasks.crops import read_crops
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


class CaptionPreprocessor:
    """Rows for LLaVA-OneVision, equal to those of its stock processor.

    vocabulary: what decoding needs to know of the tokenizer and its special tokens.

    Raises:
        CheckpointError: a file or a setting is missing, or the files contradict each other.
    """

    def __init__(self, model: Model) -> None:
        folder, architecture = model.source.folder, model.architecture
        vision, decoder = architecture.vision, architecture.decoder
        assert folder is not None
        assert vision is not None
        assert decoder is not None
        self._model = model
        self._crops = read_crops(folder, LlavaOnevisionImageProcessorPil, vision.image_size)
        check_tiling(model)
        tokenizer = load_tokenizer(folder, default="TokenizersBackend")
        self._template = read_template(folder, tokenizer)
        self._image_token, image_token_id = read_image_token(model, tokenizer)
        stop_ids = read_stop_ids(model, tokenizer)
        pad = tokenizer.pad_token_id
        pad_id = min(stop_ids) if pad is None else int(pad)
        check_vocabulary(pad_id, decoder.vocabulary)
        settings = read_generation_settings(folder)
        self.vocabulary = Vocabulary(tokenizer, image_token_id, pad_id, stop_ids, settings)

    def pictures(self, images: Sequence[Image.Image], *, detail: Detail = "high") -> Pictures:
        """Cut the upright RGB pictures of one prompt.

        A single picture is a base view and tiles; several pictures, or low detail, are one
        view each, padded to a square: the form the model was trained on for several.

        Raises:
            ImageError: a picture is too long to be padded to a square.
        """
        if len(images) > 1:
            detail = "low"
        model = self._model
        costs = [
            model.family.image_cost(model.architecture, *image.size, detail) for image in images
        ]
        crops = (crop for image in images for crop in self._cut(image, detail))
        return Pictures(
            self._crops.to_tensor(crops, sum(cost.crops for cost in costs)),
            tuple((image.height, image.width) for image in images),
            tuple(cost.crops for cost in costs),
            tuple(cost.tokens for cost in costs),
        )

    def input_ids(
        self, prompt: str, pictures: Pictures | None, *, system: str = ""
    ) -> tuple[int, ...]:
        """Token ids of a chat, the image token repeated as often as each picture costs.

        Raises:
            UsageError: a text holds the image token or is not Unicode, or the model takes no
                system prompt.
            CheckpointError: the chat template fails or leaves pictures out, or the tokenizer
                has tokens that the model lacks.
        """
        decoder = self._model.architecture.decoder
        assert decoder is not None
        costs = pictures.tokens if pictures is not None else ()
        rendered = self._rendered(len(costs), prompt, system)
        # The template writes the special tokens; `verbose` is a remark on long sequences.
        tokenizer, placeholder = self.vocabulary.tokenizer, self.vocabulary.placeholder_id
        ids = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
        places = ids.count(placeholder)
        if places != len(costs):
            raise CheckpointError(
                f"the chat template makes {places} places for {len(costs)} pictures", OTHER_MODEL
            )
        check_vocabulary(max(ids), decoder.vocabulary)
        expanded: list[int] = []
        left = iter(costs)
        for token in ids:
            expanded += [token] * (next(left) if token == placeholder else 1)
        assert expanded.count(placeholder) == sum(costs)
        return tuple(expanded)

    def _cut(self, image: Image.Image, detail: Detail) -> Iterator[Image.Image]:
        if detail == "low":
            yield self._crops.padded(image)
            return
        tiling = self._model.architecture.tiling
        assert tiling is not None
        yield self._crops.squashed(image)
        yield from self._crops.tiles(image, fitted_resolution(tiling, *image.size))

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


class EmbedPreprocessor:
    """Inputs of SigLIP's towers; only the files of what is asked for are read.

    Raises:
        CheckpointError: a file or a setting is missing, or the files contradict each other.
        UnsupportedModel: texts are asked of a vision tower alone.
    """

    def __init__(self, model: Model, *, texts: bool, images: bool) -> None:
        folder, vision, text = (
            model.source.folder,
            model.architecture.vision,
            model.architecture.text,
        )
        assert folder is not None
        assert vision is not None
        self._text = text
        self._crops = (
            read_crops(folder, SiglipImageProcessorPil, vision.image_size) if images else None
        )
        if not texts:
            return
        if text is None:
            raise UnsupportedModel(
                f"{model.source.name} has no text tower", "embed texts with the whole model"
            )
        self._lowers = False
        self._tokenizer = load_tokenizer(folder, default="SiglipTokenizer")
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
        self._lowers = not cased and self._encoded(["A CAT"]) != self._encoded(["a cat"])

    def pixels(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Squash RGB pictures to the tower's square: [B, 3, S, S] float32."""
        crops = self._crops
        assert crops is not None
        return crops.to_tensor((crops.squashed(image) for image in images), len(images))

    def tokens(self, texts: Sequence[str]) -> tuple[torch.Tensor, tuple[str, ...]]:
        """Token ids [B, positions] int64, and a note for every text that is cut.

        In lower case, ended by the end token, padded on the right to the position limit and
        without a mask: the tower pools the last position, whatever it holds.

        Raises:
            UsageError: a text is not Unicode.
            CheckpointError: the tokenizer has tokens that the model lacks.
        """
        assert self._text is not None
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
        if self._lowers:
            # As transformers' Siglip2Tokenizer does; Python's own differs on a few letters.
            texts = [Lowercase().normalize_str(text) for text in texts]
        with warnings.catch_warnings():  # SigLIP's tokenizer does on a text that ends in </s>
            warnings.simplefilter("ignore")
            encoded = self._tokenizer(list(texts), verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]


def _no_system_prompt(why: str) -> UsageError:
    return UsageError(
        f"the model's chat template takes no system prompt: {why}",
        "leave out --system, or say it in the prompt",
    )
