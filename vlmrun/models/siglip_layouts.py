"""SigLIP as timm and open_clip write it: the same towers under other names."""

from vlmrun.models import siglip
from vlmrun.models.open_clip import OPEN_CLIP_FUSED, OPEN_CLIP_RENAMES
from vlmrun.models.timm import TIMM_FUSED, TIMM_IGNORED, TIMM_RENAMES

TIMM_SIGLIP = siglip.row(
    "SigLIP vision tower of timm",
    "timm_siglip",
    "SiglipVisionModel",
    config_type="siglip_vision_model",
    architecture=siglip.vision_only_architecture,
    renames=TIMM_RENAMES,
    fused=TIMM_FUSED,
    ignored=TIMM_IGNORED,
    image_processors=("SiglipImageProcessor", "CLIPImageProcessor"),
)
OPEN_CLIP_SIGLIP = siglip.row(
    "SigLIP of open_clip",
    "open_clip_siglip",
    "SiglipModel",
    config_type="siglip",
    architecture=siglip.architecture,
    renames=OPEN_CLIP_RENAMES,
    fused=OPEN_CLIP_FUSED,
)
