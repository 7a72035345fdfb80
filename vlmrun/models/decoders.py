"""Language models that read pictures' features: Qwen2, Llama, Mistral, Gemma and Gemma 2.

One shape with small differences: which projections have a bias, how many norms a block has,
how attention is computed. Class defaults are transformers' own; hub files leave them out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vlmrun.errors import UnsupportedModel
from vlmrun.models.family import MOST_LAYERS, Config, contradiction, number, section
from vlmrun.models.layer import Block, Shape
from vlmrun.models.shapes import Decoder
from vlmrun.models.towers import check_heads

PREFIX = "model.language_model"
TABLE = f"{PREFIX}.embed_tokens.weight"
HEAD = "lm_head.weight"
BIASES = ("attention_bias", "mlp_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How one model_type of decoder differs from the others.

    qkv_bias: always, where others may ask for it by BIASES; norms: those of a block;
    overflows_float16: what passes the blocks is larger than that format holds.
    """

    defaults: Config
    qkv_bias: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    soft_capped: bool = False
    overflows_float16: bool = False


LLAMA_DEFAULTS: Config = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN2_DEFAULTS: Config = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
MISTRAL_DEFAULTS: Config = {
    **QWEN2_DEFAULTS,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
GEMMA_DEFAULTS: Config = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
GEMMA2_DEFAULTS: Config = {
    **GEMMA_DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SANDWICHED = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
KINDS: Mapping[str, Kind] = {
    "qwen2": Kind(defaults=QWEN2_DEFAULTS, qkv_bias=True),
    "llama": Kind(defaults=LLAMA_DEFAULTS),
    "mistral": Kind(defaults=MISTRAL_DEFAULTS),
    "gemma": Kind(defaults=GEMMA_DEFAULTS, overflows_float16=True),
    "gemma2": Kind(
        defaults=GEMMA2_DEFAULTS, norms=SANDWICHED, soft_capped=True, overflows_float16=True
    ),
}


def read_decoder(config: Config, supported: tuple[str, ...]) -> tuple[Decoder, Config]:
    """Read the decoder that `text_config` describes; returns it and the filled-in part.

    supported: kinds the family is known with; the first is meant where none is named.

    Raises:
        UnsupportedModel: it is another.
        CheckpointError: a number is missing or cannot be.
    """
    given = config.get("text_config")
    named = given.get("model_type") if isinstance(given, Mapping) else None
    kind = supported[0] if named is None else str(named)
    if kind not in supported:
        raise UnsupportedModel(
            f"text_config.model_type is {kind!r}, and this family needs "
            f"{' or '.join(map(repr, supported))}",
            "vlmrun caption --allow-untested tries others, without a promise",
        )
    text = section(config, "text_config", KINDS[kind].defaults)
    check_attention(kind, text)
    return decoder_of(kind, text), text


def check_attention(kind: str, config: Config) -> None:
    """Refuse what would change attention or its rotary angles, and is not run as it should be.

    Raises:
        UnsupportedModel: it is asked for.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    window, share = config.get("sliding_window"), config.get("partial_rotary_factor")
    layers = config.get("layer_types") or ()
    windowed = kind in ("mistral", "gemma2")
    if windowed and window is not None:
        number(config, "sliding_window")
    for asked, what in (
        # its angles follow the longest row of a batch, and change under keys that are stored
        (scaling in ("dynamic", "longrope"), f"rope_type {scaling!r}"),
        (share not in (None, 1, 1.0), f"partial_rotary_factor {share!r}"),
        (kind in ("llama", "gemma") and window is not None, f"sliding_window {window!r}"),
        (kind == "gemma2" and "sliding_window" in config and window is None, "no sliding_window"),
        (not windowed and "sliding_attention" in layers, "sliding layers"),
        (config.get("is_causal") is False, "is_causal false"),
    ):
        if asked:
            raise UnsupportedModel(
                f"a {kind} decoder with {what} is not supported",
                "give a checkpoint as its authors published it",
            )


def decoder_of(kind: str, config: Config) -> Decoder:
    width, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    if config.get("head_dim") is None:
        check_heads(width, heads)
        config = {**config, "head_dim": width // heads}
    if config["num_key_value_heads"] is None:
        config = {**config, "num_key_value_heads": heads}
    decoder = Decoder(
        kind=kind,
        layers=number(config, "num_hidden_layers", most=MOST_LAYERS),
        width=width,
        mlp_width=number(config, "intermediate_size"),
        heads=heads,
        kv_heads=number(config, "num_key_value_heads"),
        head_dim=number(config, "head_dim"),
        vocabulary=number(config, "vocab_size"),
        positions=number(config, "max_position_embeddings"),
        soft_capped=KINDS[kind].soft_capped,
    )
    if heads % decoder.kv_heads:
        raise contradiction(f"{decoder.kv_heads} key-value heads do not divide {heads} heads")
    return decoder


def decoder_layer(path: str, decoder: Decoder, config: Config) -> dict[str, Shape]:
    """Tensors of one decoder block; `config` is the filled-in text part."""
    kind, width, mlp_width = KINDS[decoder.kind], decoder.width, decoder.mlp_width
    inner, shared = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    asked = {name: bool(config[name]) for name in BIASES if name in kind.defaults}
    attention, mlp = (asked.get(name, False) for name in BIASES)
    tensors: dict[str, Shape] = {}
    for name, wide, narrow, bias in (
        ("self_attn.q_proj", inner, width, kind.qkv_bias or attention),
        ("self_attn.k_proj", shared, width, kind.qkv_bias or attention),
        ("self_attn.v_proj", shared, width, kind.qkv_bias or attention),
        ("self_attn.o_proj", width, inner, attention),
        ("mlp.gate_proj", mlp_width, width, mlp),
        ("mlp.up_proj", mlp_width, width, mlp),
        ("mlp.down_proj", width, mlp_width, mlp),
    ):
        tensors[f"{path}.{name}.weight"] = (wide, narrow)
        if bias:
            tensors[f"{path}.{name}.bias"] = (wide,)
    return tensors | {f"{path}.{name}.weight": (width,) for name in kind.norms}


def decoder_blocks(decoder: Decoder, config: Config) -> list[Block]:
    """Token table, blocks, final norm and head; `config` is the filled-in text part."""
    table = (decoder.vocabulary, decoder.width)
    blocks = [
        Block("decoder.tokens", "decoder", f"{PREFIX}.embed_tokens", {TABLE: table}, gathered=True)
    ]
    for i in range(decoder.layers):
        path = f"{PREFIX}.layers.{i}"
        tensors = decoder_layer(path, decoder, config)
        blocks.append(Block(f"decoder.layers.{i}", "decoder", path, tensors, quantised=True))
    last: dict[str, Shape] = {f"{PREFIX}.norm.weight": (decoder.width,)}
    blocks.append(Block("decoder.norm", "decoder", f"{PREFIX}.norm", last))
    blocks.append(Block("head", "head", "lm_head", {HEAD: table}, row_blocks=True, quantised=True))
    return blocks


def ties(config: Config, text: Config) -> dict[str, str]:
    """The head is tied to the token table when either part of the configuration says so: hub
    files of OneVision-0.5B say it in the text part only."""
    tied = bool(config.get("tie_word_embeddings")) or bool(text["tie_word_embeddings"])
    return {TABLE: HEAD} if tied else {}
