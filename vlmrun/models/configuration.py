"""The configuration of a model on this machine, wherever it is said, in transformers' spelling."""

from vlmrun.models.checkpoints.checkpoint import read_header
from vlmrun.models.checkpoints.file_names import OPEN_CLIP, find_weights
from vlmrun.models.checkpoints.folder import read_json
from vlmrun.models.checkpoints.source import Source
from vlmrun.models.families import is_supported
from vlmrun.models.family import Config
from vlmrun.models.inferred import infer_config
from vlmrun.models.open_clip import translate_open_clip
from vlmrun.models.timm import translate_timm


def read_configuration(source: Source) -> tuple[Config, tuple[str, ...]]:
    """Read a source's configuration, and what had to be assumed where a file comes without one.

    Raises:
        CheckpointError: it cannot be read, or contradicts itself.
        UnsupportedModel: it is of timm or open_clip and not a SigLIP that is run, or a file
            without one is no SigLIP vision tower.
    """
    folder = source.folder
    assert folder is not None
    own, open_clip = folder / "config.json", folder / "open_clip_config.json"
    weights = source.file or find_weights([path.name for path in folder.iterdir()])
    if open_clip.exists() and (weights == OPEN_CLIP or not own.exists()):
        return translate_open_clip(read_json(open_clip)), ()
    if source.file is None or own.exists():
        config = translated(read_json(own))
        if source.file is None or is_supported(config):
            return config, ()
    config, note = infer_config(read_header(folder / source.file))
    return config, (note,)


def translated(config: Config) -> Config:
    """timm's configurations name an architecture and no model_type."""
    is_timm = "model_type" not in config and "architecture" in config
    return translate_timm(config) if is_timm else config
