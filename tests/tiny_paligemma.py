"""Tiny PaliGemmas in hub layout, with random weights, and Gemma's kind of tokenizer."""

from pathlib import Path
from typing import Any, Literal

from light import HUB_ONEVISION
from tiny import (
    IMAGE_SIZE,
    PATCH_SIZE,
    VISION,
    write_image_processor,
    write_model,
)
from tiny_tokenizers import SENTENCES, write_json
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

SPECIAL = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = 400  # entries of the tokenizer before the added ones
ADDED = [f"<loc{i:04}>" for i in range(1024)] + [f"<seg{i:03}>" for i in range(128)]
IMAGE = WORDS + len(ADDED)  # id of `<image>`
VOCABULARY = IMAGE + 9  # a few more than the tokenizer has, as the hub's are padded too
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
GEMMA = {
    "model_type": "gemma",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "vocab_size": VOCABULARY,
}
# caps that bend what passes, a scale of its own, and layers of both kinds
GEMMA2 = {
    **GEMMA,
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 9,
    "sliding_window": 12,  # less than a picture's tokens
}


def build_paligemma(
    folder: Path,
    *,
    version: Literal[1, 2] = 1,
    dtype: str = "float32",
    shards: int = 1,
    spelling: Literal["hub", "module"] = "hub",
    tied: bool = True,
    image_token: int = IMAGE,
    **text: Any,
) -> Path:
    """A `PaliGemmaForConditionalGeneration` over a SigLIP tower without pooling head.

    As the hub's files, a tied one says nothing of it and has no head. text: other values of
    the decoder's configuration.
    """
    decoder = {**(GEMMA if version == 1 else GEMMA2), **text}
    config = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "image_token_index": image_token,
        "projection_dim": decoder["hidden_size"],
        "text_config": decoder,
        "torch_dtype": dtype,
        "vision_config": {**VISION, "vision_use_head": False},
        **({} if tied else {"tie_word_embeddings": False}),
    }
    renames = HUB_ONEVISION if spelling == "hub" else {}
    write_model(folder, config, dtype=dtype, shards=shards, renames=renames)
    ends = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    write_json(folder / "generation_config.json", ends)
    write_image_processor(
        folder,
        "Siglip",
        IMAGE_SIZE,
        image_seq_length=IMAGE_TOKENS,
        processor_class="PaliGemmaProcessor",
    )
    write_gemma_tokenizer(folder)
    return folder


def write_gemma_tokenizer(folder: Path) -> None:
    """Byte pairs over words whose spaces are underlined, bytes for what it does not know; places
    and masks of segments among the added tokens, `<image>` the last of them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=[*SPECIAL, "\n", *BYTES], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    missing = WORDS - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused{i}>" for i in range(missing)])
    tokenizer.add_tokens(ADDED)
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "GemmaTokenizer",
        "processor_class": "PaliGemmaProcessor",
        "additional_special_tokens": ["<image>"],
        "add_bos_token": True,
        "add_eos_token": False,
        **{f"{name[1:-1]}_token": name for name in SPECIAL},
    }
    write_json(folder / "tokenizer_config.json", settings)
