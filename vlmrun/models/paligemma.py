"""PaliGemma 1 and 2 (Beyer et al. 2024, arXiv:2407.07726; Steiner et al. 2024, arXiv:2412.03555):
SigLIP tower after its last norm, one linear layer, Gemma or Gemma 2.

The whole prompt, picture and text, sees itself in both directions, and its first token is
number 1. There is no chat: the prompt names a task, as `caption en`.
"""

from dataclasses import replace

from vlmrun.models import decoders, multimodal, towers
from vlmrun.models.family import Config, Family, ImageCost, View, contradiction, number
from vlmrun.models.layer import Block
from vlmrun.models.shapes import Architecture

# of a configuration without these parts; where they are there, SigLIP's and Gemma's hold
VISION_DEFAULTS: Config = {
    **towers.SIGLIP_DEFAULTS,
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "vision_use_head": False,
}
TEXT_DEFAULTS: Config = {
    **decoders.GEMMA_DEFAULTS,
    "vocab_size": 257152,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
PROJECTION = 2048  # numbers of a picture's vectors, where the configuration leaves it out


def architecture(config: Config) -> Architecture:
    """Vision tower, projector, decoder, head."""
    said = config.get("text_config") or {}
    if config.get("vision_config") is None:
        config = {**config, "vision_config": VISION_DEFAULTS}
    if config.get("text_config") is None:
        config = {**config, "text_config": TEXT_DEFAULTS}
    vision = towers.read_vision(config, "siglip_vision_model")
    decoder, text = decoders.read_decoder(config, ("gemma", "gemma2"))
    wide = number({"projection_dim": PROJECTION, **config}, "projection_dim")
    if wide != decoder.width:
        raise contradiction(f"projection_dim is {wide}, and the decoder is {decoder.width} wide")
    path = f"{multimodal.PROJECTOR}.linear"
    projector = Block(
        "projector",
        "projector",
        multimodal.PROJECTOR,
        towers.linear(path, decoder.width, vision.width),
        quantised=True,
    )
    return Architecture(
        multimodal.blocks(vision, decoder, text, projector),
        vision=vision,
        decoder=replace(decoder, prefix=True, first_position=1),
        feature_layers=(vision.layers,),
        normed=True,
        # the top decides, as in stock, or the text part where it says so itself
        ties=decoders.ties(
            {"tie_word_embeddings": True, **config}, {"tie_word_embeddings": False, **said}
        ),
    )


def image_cost(architecture: Architecture, width: int, height: int, view: View) -> ImageCost:
    """A picture is squashed to the tower's square, whatever its shape."""
    return ImageCost(crops=1, tokens=architecture.crop_tokens)


PALIGEMMA = Family(
    name="PaliGemma",
    model_types=("paligemma",),
    model_class="PaliGemmaForConditionalGeneration",
    task="caption",
    architecture=architecture,
    renames=multimodal.RENAMES,
    fused=towers.FUSED_HEAD,
    ignored=multimodal.OLD_KEYS,
    image_processors=("SiglipImageProcessor",),
    image_cost=image_cost,
    phases=multimodal.phases,
    image_token_id=256000,
    default_prompt="caption en",
    prompt_style="prefix",
)
