"""LLaVA and LLaVA-NeXT: shapes and defaults of transformers, refusals, how they are asked."""

from typing import Any

import pytest
from light import TINY_VISION, changed, model_of, words
from test_families import meta_shapes
from transformers.utils.chat_template_utils import render_jinja_template

from vlmrun.errors import CheckpointError, UnsupportedModel, VlmrunError
from vlmrun.models import llava, llava_next
from vlmrun.models.families import family_of
from vlmrun.models.family import Config, View
from vlmrun.models.towers import filed_shapes

TEXT = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
}
CLIP = {**TINY_VISION, "model_type": "clip_vision_model"}
LLAVA: dict[str, Any] = {"model_type": "llava", "text_config": TEXT, "vision_config": CLIP}
JOYCAPTION = {
    **LLAVA,
    "vision_config": TINY_VISION,
    "vision_feature_select_strategy": "full",
}
NEXT = {**LLAVA, "model_type": "llava_next", "image_grid_pinpoints": [[28, 56], [56, 56]]}
SIGLIP_NEXT = {**NEXT, "vision_config": TINY_VISION, "vision_feature_select_strategy": "full"}
MISTRAL = {**TEXT, "model_type": "mistral", "sliding_window": None}
SHAPES: dict[str, Config] = {
    "llava of defaults": {"model_type": "llava"},
    "llava": LLAVA,
    "llava over mistral": {**LLAVA, "text_config": MISTRAL},
    "llava over mistral of wide heads": {**LLAVA, "text_config": {**MISTRAL, "head_dim": 8}},
    "llava over qwen2": changed(LLAVA, "text_config", model_type="qwen2"),
    "llava, biases": changed(LLAVA, "text_config", attention_bias=True, mlp_bias=True),
    "llava, tower null": {**LLAVA, "vision_config": None},
    "llava, tower of CLIP's defaults": {**LLAVA, "vision_config": {"hidden_size": 96}},
    "llava, no projector bias": {**LLAVA, "multimodal_projector_bias": False},
    "llava, two layers": {**LLAVA, "vision_feature_layer": [-2, 1]},
    "joycaption": JOYCAPTION,
    "next of defaults": {"model_type": "llava_next"},
    "next": NEXT,
    "next over siglip": SIGLIP_NEXT,
}


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_hold_every_tensor_of_the_stock_model_once(name: str) -> None:
    config = SHAPES[name]
    blocks = family_of(config).architecture(config).blocks
    paths = [path for block in blocks for path in block.tensors]
    assert len(paths) == len(set(paths))
    found = {path: shape for block in blocks for path, shape in block.tensors.items()}
    assert filed_shapes(found) == meta_shapes(config)


def test_defaults_are_those_of_the_stock_classes() -> None:
    import transformers

    for stock in transformers.LlavaConfig(), transformers.LlavaNextConfig():
        assert stock.vision_config.model_type == llava.TOWERS[0]
        assert stock.text_config.model_type == llava.DECODERS[0]
        own = {name: getattr(stock.vision_config, name) for name in llava.VISION_DEFAULTS}
        assert own == llava.VISION_DEFAULTS
        found = family_of({"model_type": stock.model_type}).architecture({})
        assert found.feature_layers == (stock.vision_feature_layer % 25,)
        assert found.first_dropped == (stock.vision_feature_select_strategy == "default")
        assert stock.multimodal_projector_bias
        assert not stock.tie_word_embeddings
    assert stock.image_grid_pinpoints == llava_next.RESOLUTIONS


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"model_type": "llava"}, 576),
        (LLAVA, 16),
        ({**LLAVA, "vision_feature_select_strategy": "full"}, 17),
        (JOYCAPTION, 16),
        ({**JOYCAPTION, "vision_feature_select_strategy": "default"}, 15),
    ],
)
@pytest.mark.parametrize("view", [View(), View(detail="low")])
def test_a_llava_picture_is_one_crop(config: Config, tokens: int, view: View) -> None:
    cost = llava.image_cost(llava.architecture(config), 1000, 10, view)
    assert (cost.crops, cost.tokens) == (1, tokens)


@pytest.mark.parametrize("family", ["llava", "llava_next"])
@pytest.mark.parametrize("section", ["", "text_config"])
def test_either_part_of_the_configuration_ties_the_head(family: str, section: str) -> None:
    config = {**NEXT, "model_type": family}
    assert not family_of(config).architecture(config).ties
    tied = changed(config, section, tie_word_embeddings=True)
    table, head = "model.language_model.embed_tokens.weight", "lm_head.weight"
    assert family_of(tied).architecture(tied).ties == {table: head}
    assert "lm_head.weight" not in model_of(tied).checkpoint.tensors


@pytest.mark.parametrize(
    ("config", "error", "expected"),
    [
        (changed(LLAVA, "text_config", model_type="granite"), UnsupportedModel, "'granite'"),
        (changed(LLAVA, "text_config", model_type="phi3"), UnsupportedModel, "'phi3'"),
        (changed(NEXT, "text_config", model_type="gemma2"), UnsupportedModel, "'gemma2'"),
        (
            changed(LLAVA, "text_config", model_type="qwen2", use_sliding_window=True),
            UnsupportedModel,
            "sliding-window",
        ),
        ({**NEXT, "text_config": {**MISTRAL, "sliding_window": [4]}}, CheckpointError, "not [4]"),
        ({**NEXT, "text_config": {**MISTRAL, "sliding_window": "4"}}, CheckpointError, "not '4'"),
        (
            changed(LLAVA, "vision_config", model_type="pixtral"),
            UnsupportedModel,
            "vision_config.model_type is 'pixtral', and this family needs 'clip_vision_model' or",
        ),
        (changed(NEXT, "vision_config", model_type="siglip2_vision_model"), UnsupportedModel, "si"),
        (
            {**SIGLIP_NEXT, "vision_feature_select_strategy": "default"},
            UnsupportedModel,
            "is 'default' and the tower has no class token",
        ),
        (
            {**NEXT, "vision_feature_select_strategy": "full"},
            UnsupportedModel,
            "is 'full' and the tower has a class token",
        ),
        ({**LLAVA, "vision_feature_select_strategy": "cls"}, CheckpointError, "neither 'default'"),
        ({**LLAVA, "vision_feature_layer": -9}, CheckpointError, "-9 names no layer"),
        ({**NEXT, "image_grid_pinpoints": [[28, 40]]}, CheckpointError, "multiples of 28"),
        ({**NEXT, "image_grid_pinpoints": [[28, 1e400]]}, CheckpointError, "multiples of 28"),
        ({**NEXT, "image_grid_pinpoints": [["28", 28]]}, CheckpointError, "multiples of 28"),
        ({**NEXT, "image_grid_pinpoints": [[28.0, 28]]}, CheckpointError, "multiples of 28"),
        ({"model_type": "vipllava"}, UnsupportedModel, "'vipllava' are not supported"),
    ],
)
def test_what_is_not_run_is_refused_by_name(
    config: Config, error: type[VlmrunError], expected: str
) -> None:
    with pytest.raises(error) as caught:
        family_of(config).architecture(config)
    assert expected in words(caught.value)


VICUNA_LINE = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the human's questions. "
)
LLAMA3_LINE = (
    "You are a helpful language and vision assistant. You are able to understand the visual "
    "content that the user provides, and assist the user with a variety of tasks using natural "
    "language."
)
BASE, INSTRUCT = "mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.2"
# what the models' cards and transformers' documentation say to send
PROMPTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "llava-1.5-7b": (
        {"model_type": "llava"},
        {"vocab_size": 32064},
        "USER: <image>\nWhat is it? ASSISTANT:",
    ),
    "bakLlava-v1": (
        {"model_type": "llava"},
        {"model_type": "mistral", "_name_or_path": BASE},
        "USER: <image>\nWhat is it? ASSISTANT:",
    ),
    "llava-med": (
        {"model_type": "llava"},
        {"model_type": "mistral", "_name_or_path": INSTRUCT},
        "[INST] <image>\nWhat is it? [/INST]",
    ),
    "llava-llama-3-8b": (
        {"model_type": "llava", "image_token_index": 128257},
        {"vocab_size": 128320},
        "<|start_header_id|>user<|end_header_id|>\n\n<image>\nWhat is it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "joycaption": (
        {"model_type": "llava", "image_token_index": 128077},
        {"vocab_size": 128256},
        "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 July 2024\n\nYou are a helpful image captioner.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n"
        "<|reserved_special_token_70|><image><|reserved_special_token_71|>What is it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llava-v1.6-mistral": (
        {"model_type": "llava_next"},
        {"model_type": "mistral", "vocab_size": 32064},
        "[INST] <image>\nWhat is it? [/INST]",
    ),
    "llava-v1.6-vicuna": (
        {"model_type": "llava_next"},
        {"vocab_size": 32064},
        f"{VICUNA_LINE}USER: <image>\nWhat is it? ASSISTANT:",
    ),
    "llava-v1.6-34b": (
        {"model_type": "llava_next"},
        {"vocab_size": 64064},
        "<|im_start|>system\nAnswer the questions.<|im_end|><|im_start|>user\n<image>\n"
        "What is it?<|im_end|><|im_start|>assistant\n",
    ),
    "llama3-llava-next-8b": (
        {"model_type": "llava_next"},
        {"vocab_size": 128320},
        f"<|start_header_id|>system<|end_header_id|>\n\n{LLAMA3_LINE}<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n<image>\nWhat is it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llava-next-72b": (
        {"model_type": "llava_next"},
        {"model_type": "qwen2"},
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<image>\n"
        "What is it?<|im_end|>\n<|im_start|>assistant\n",
    ),
}


def rendered(config: Config, system: str = "") -> str:
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content}]
    if system:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    [text], _ = render_jinja_template(
        [messages],
        chat_template=family_of(config).chat_template(config),
        add_generation_prompt=True,
        image_token="<image>",
    )
    return str(text)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_without_a_template_are_the_model_cards(name: str) -> None:
    top, text, expected = PROMPTS[name]
    config = {**top, "text_config": {"model_type": "llama", **text}}
    assert rendered(config) == expected
    told = rendered(config, system="Be brief.")
    assert "Be brief." in told
    assert told.endswith(expected[expected.index("<image>") :])
    assert not any(line in told for line in (VICUNA_LINE, LLAMA3_LINE, "You are", "Answer the"))


@pytest.mark.parametrize(
    "text",
    [
        {"model_type": "mistral"},
        {"model_type": "mistral", "_name_or_path": "someone/own-model"},
        {"model_type": "qwen2"},
        {"model_type": "llama", "vocab_size": 50000},
    ],
)
def test_a_form_that_cannot_be_known_is_none(text: Config) -> None:
    assert llava.chat_template({"model_type": "llava", "text_config": text}) == ""
