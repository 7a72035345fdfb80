"""The list of families. Adding one is adding a file beside this one and its row here."""

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.family import Config, Family
from vlmrun.models.llava import LLAVA
from vlmrun.models.llava_next import LLAVA_NEXT
from vlmrun.models.onevision import LLAVA_ONEVISION
from vlmrun.models.paligemma import PALIGEMMA
from vlmrun.models.siglip import SIGLIP, SIGLIP_VISION
from vlmrun.models.siglip2 import SIGLIP2, SIGLIP2_VISION
from vlmrun.models.siglip_layouts import OPEN_CLIP_SIGLIP, TIMM_SIGLIP

FAMILIES: tuple[Family, ...] = (
    SIGLIP,
    SIGLIP_VISION,
    SIGLIP2,
    SIGLIP2_VISION,
    TIMM_SIGLIP,
    OPEN_CLIP_SIGLIP,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    PALIGEMMA,
)


def is_supported(config: Config) -> bool:
    return any(config.get("model_type") in family.model_types for family in FAMILIES)


def family_of(config: Config) -> Family:
    """The family of a configuration, by its `model_type` and never by a name.

    Raises:
        CheckpointError: config.json names no model_type.
        UnsupportedModel: no family runs it; the message lists those that do.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError("config.json names no model_type", "is this a model's folder?")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    own = (TIMM_SIGLIP, OPEN_CLIP_SIGLIP)  # whose files name no model_type
    known = ", ".join(kind for f in FAMILIES if f not in own for kind in f.model_types)
    raise UnsupportedModel(
        f"models of type {kind!r} are not supported",
        f"supported: {known}, and SigLIP of timm and open_clip; "
        "vlmrun caption --allow-untested tries others, without a promise",
    )
