"""The text part of a OneVision checkpoint as a GGUF file, for llama.cpp."""

import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

from peers.task import text_config

TYPES = {"bfloat16": gguf.GGMLQuantizationType.BF16, "int8": gguf.GGMLQuantizationType.Q8_0}
FILE_TYPES = {"bfloat16": gguf.LlamaFileType.MOSTLY_BF16, "int8": gguf.LlamaFileType.MOSTLY_Q8_0}
TEXT = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)")
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, file: Path, dtype: str) -> None:
    """Matrices as the dtype says (int8 is q8_0), vectors in float32, both as llama.cpp's own
    converter writes them. The tokenizer is a stand-in: token ids are given and taken."""
    config = text_config(str(folder))
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_file_type(FILE_TYPES[dtype])
    add_tokens(writer, config["vocab_size"])
    for name, numbers in text_tensors(folder):
        kind = TYPES[dtype] if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)


def add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    words = ["a", "b", "ab", *(f"t{at}" for at in range(count - 3))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)
    writer.add_bos_token_id(count - 1)


def text_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """By name as llama.cpp spells it, in float32; a tied head is not written."""
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as opened:
            for key in filter(TEXT.fullmatch, opened.keys()):
                yield spelled(TEXT.sub(r"\1", key)), opened.get_tensor(key).float().numpy()


def spelled(path: str) -> str:
    """`layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", path)
    if match:
        return f"blk.{match[1]}.{PARTS[match[2]]}.{match[3]}"
    return {
        "embed_tokens.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }[path]
