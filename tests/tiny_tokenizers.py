"""Tokenizers of the tiny checkpoints, trained on a few sentences each time."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SIGLIP_POSITIONS, SIGLIP_TOKENS, SIGLIP2_TOKENS = 16, 200, 300
CHAT_POSITIONS = 1024
CHAT_TOKENS = 395  # then the special ones
SPECIAL = {
    token: CHAT_TOKENS + at
    for at, token in enumerate(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
    )
}
SENTENCES = (
    "describe this image. what is in the picture? answer with one word, please.",
    "a red apple to the left of a green pear, an elephant above an umbrella",
    "the quick brown fox jumps over the lazy dog and two cats sleep under a table",
    "five boxing wizards jump quickly while twelve judges watch a vexing zebra",
)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1))


def write_sentencepiece_tokenizer(folder: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        vocab_size=SIGLIP_TOKENS,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    settings = {
        "tokenizer_class": "SiglipTokenizer",
        "processor_class": "SiglipProcessor",
        "do_lower_case": True,
        "model_max_length": SIGLIP_POSITIONS,
        "model_input_names": ["input_ids"],
        "pad_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_lower_case_tokenizer(folder: Path) -> None:
    tokenizer = _train_byte_pairs(SIGLIP2_TOKENS, special=("<pad>", "<eos>", "<bos>", "<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "SiglipProcessor",
        "model_max_length": SIGLIP_POSITIONS,
        "model_input_names": ["input_ids"],
        "padding_side": "right",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_chat_tokenizer(folder: Path, *, start: str | None = None) -> None:
    """Qwen2's kind, which adds nothing to a text; or one that puts a token before every text."""
    tokenizer = _train_byte_pairs(CHAT_TOKENS)
    tokenizer.add_special_tokens(list(SPECIAL))
    if start is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, SPECIAL[start])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer" if start is None else "PreTrainedTokenizerFast",
        "processor_class": "LlavaOnevisionProcessor",
        "model_max_length": CHAT_POSITIONS,
        "padding_side": "left",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        **({} if start is None else {"bos_token": start}),
        "additional_special_tokens": [token for token in SPECIAL if token.startswith("<|im")],
    }
    write_json(folder / "tokenizer_config.json", settings)


def _train_byte_pairs(size: int, *, special: Sequence[str] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer
