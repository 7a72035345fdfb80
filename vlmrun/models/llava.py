"""LLaVA 1.5 (Liu et al. 2023, arXiv:2310.03744) and models of its form: BakLLaVA, JoyCaption.

A picture is one crop. Vicuna, Mistral, Llama 3 or Qwen2 sees the vectors of a CLIP or SigLIP
tower, all of them or all but the first.
"""

from vlmrun.errors import UnsupportedModel
from vlmrun.models import decoders, multimodal, templates, towers
from vlmrun.models.family import Config, Family, ImageCost, View
from vlmrun.models.shapes import Architecture

VISION_DEFAULTS: Config = {  # of a configuration without vision_config; else CLIP's hold
    **towers.CLIP_DEFAULTS,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
TOWERS = ("clip_vision_model", "siglip_vision_model")
DECODERS = ("llama", "mistral", "qwen2")
VICUNA_TOKENS = range(32_000, 32_129)  # with the image token, rounded up
LLAMA3_TOKENS = range(128_256, 128_513)
JOYCAPTION_IMAGE = 128_077  # a token that Llama 3 keeps in reserve


def architecture(config: Config, *, newline: bool = False) -> Architecture:
    """Vision tower, projector, decoder, head; `newline` where a vector ends each row of tiles."""
    if config.get("vision_config") is None:
        config = {**config, "vision_config": VISION_DEFAULTS}
    vision = towers.read_vision(config, *TOWERS)
    decoder, text = decoders.read_decoder(config, DECODERS)
    if text.get("use_sliding_window"):
        raise UnsupportedModel(
            "a Qwen2 decoder with sliding-window attention is not supported",
            "choose another --model",
        )
    features = multimodal.feature_layers(config, vision.layers, default=-2)
    projector = multimodal.mlp_projector(config, vision, len(features), decoder, newline=newline)
    return Architecture(
        multimodal.blocks(vision, decoder, text, projector),
        vision=vision,
        decoder=decoder,
        feature_layers=features,
        first_dropped=multimodal.drops_first(config, default="default"),
        ties=decoders.ties(config, text),
    )


def image_cost(architecture: Architecture, width: int, height: int, view: View) -> ImageCost:
    """A picture is one crop, whatever its shape and the detail asked for."""
    return ImageCost(crops=1, tokens=architecture.crop_tokens)


def chat_template(config: Config) -> str:
    """The form of the decoder's own chats; unknown of a Mistral whose origin is not named."""
    kind, vocabulary, origin = multimodal.decoder_facts(config)
    if kind == "llama" and config.get("image_token_index") == JOYCAPTION_IMAGE:
        return templates.JOYCAPTION
    if kind == "llama" and vocabulary in VICUNA_TOKENS:
        return templates.VICUNA
    if kind == "llama" and vocabulary in LLAMA3_TOKENS:
        return templates.LLAMA3
    if kind == "mistral" and "Instruct" in origin:
        return templates.MISTRAL
    if kind == "mistral" and origin.endswith("Mistral-7B-v0.1"):  # BakLLaVA
        return templates.VICUNA
    return ""


LLAVA = Family(
    name="LLaVA",
    model_types=("llava",),
    model_class="LlavaForConditionalGeneration",
    task="caption",
    architecture=architecture,
    renames=multimodal.RENAMES,
    fused=towers.FUSED_HEAD,
    ignored=multimodal.OLD_KEYS,
    image_processors=("LlavaImageProcessor", "CLIPImageProcessor", "SiglipImageProcessor"),
    image_cost=image_cost,
    phases=multimodal.phases,
    image_token_id=32000,
    default_prompt="Describe this image.",
    chat_template=chat_template,
)
