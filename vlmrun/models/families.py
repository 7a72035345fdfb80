"""The list of families. Adding one is adding a file beside this one and its row here."""

from vlmrun.errors import CheckpointError, UnsupportedModel
from vlmrun.models.family import Config, Family
from vlmrun.models.onevision import LLAVA_ONEVISION
from vlmrun.models.siglip import SIGLIP, SIGLIP_VISION

FAMILIES: tuple[Family, ...] = (SIGLIP, SIGLIP_VISION, LLAVA_ONEVISION)


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
    known = ", ".join(f"{f.name} ({', '.join(f.model_types)})" for f in FAMILIES)
    raise UnsupportedModel(
        f"models of type {kind!r} are not supported",
        f"supported: {known}; vlmrun caption --allow-untested tries others, without a promise",
    )
