"""LLaVA-NeXT, or LLaVA 1.6 (Liu et al. 2024): a picture is a base view and a grid of tiles.

Unlike LLaVA-OneVision's, a grid costs as many tokens as it has patches, however many these are.
"""

from dataclasses import replace

from vlmrun.errors import UnsupportedModel
from vlmrun.models import anyres, llava, multimodal, templates, towers
from vlmrun.models.family import Config, Family, ImageCost, View
from vlmrun.models.shapes import Architecture

RESOLUTIONS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
YI_TOKENS = range(64_000, 64_129)


def architecture(config: Config) -> Architecture:
    """LLaVA's parts, the newline vector, and the grid that pictures are fitted to."""
    found = llava.architecture(config, newline=True)
    assert found.vision is not None
    if found.crop_tokens != found.vision.tokens:
        strategy, tower = ("default", "no") if found.first_dropped else ("full", "a")
        raise UnsupportedModel(
            f"vision_feature_select_strategy is {strategy!r} and the tower has {tower} class "
            "token, so its vectors make no grid",
            "config.json may be of another model; choose another --model",
        )
    side = found.vision.image_size
    return replace(found, tiling=anyres.read_tiling(config, RESOLUTIONS, side, None))


def image_cost(architecture: Architecture, width: int, height: int, view: View) -> ImageCost:
    """Crops and tokens of one picture of width × height pixels.

    High detail: the base view, the tiles of the fitted resolution without their padding, and
    one newline token per row of patches. Low detail: the base view and one newline.
    """
    vision, tiling = architecture.vision, architecture.tiling
    assert vision is not None
    assert tiling is not None
    if view.detail == "low":
        return ImageCost(crops=1, tokens=vision.tokens + 1)
    rows, columns = anyres.unpadded(tiling, vision, width, height)
    crops = 1 + anyres.tile_count(tiling, vision, width, height)
    return ImageCost(crops=crops, tokens=vision.tokens + rows * columns + rows)


def chat_template(config: Config) -> str:
    """The form of the decoder's own chats."""
    kind, vocabulary, _ = multimodal.decoder_facts(config)
    if kind == "llama" and vocabulary in llava.VICUNA_TOKENS:
        return templates.VICUNA_NEXT
    if kind == "llama" and vocabulary in YI_TOKENS:
        return templates.HERMES
    if kind == "llama" and vocabulary in llava.LLAMA3_TOKENS:
        return templates.LLAMA3_NEXT
    return {"mistral": templates.MISTRAL, "qwen2": templates.QWEN}.get(kind, "")


LLAVA_NEXT = Family(
    name="LLaVA-NeXT",
    model_types=("llava_next",),
    model_class="LlavaNextForConditionalGeneration",
    task="caption",
    architecture=architecture,
    renames=multimodal.RENAMES,
    fused=towers.FUSED_HEAD,
    ignored=multimodal.OLD_KEYS,
    image_processors=("LlavaNextImageProcessor",),
    image_cost=image_cost,
    phases=multimodal.phases,
    image_token_id=32000,
    default_prompt="Describe this image.",
    chat_template=chat_template,
)
