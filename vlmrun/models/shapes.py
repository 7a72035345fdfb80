"""What the configuration says of an architecture, as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vlmrun.models.layer import Block


@dataclass(frozen=True, slots=True)
class VisionTower:
    layers: int
    width: int
    mlp_width: int
    heads: int
    head_dim: int
    image_size: int
    patch_size: int
    channels: int
    pooled: bool
    class_token: bool = False  # CLIP's, before the patches
    naflex: bool = False  # pictures keep their shape and come as flattened patches, padded

    @property
    def tokens(self) -> int:
        """Patches of one crop; rows and columns that do not fill a patch are not seen."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def positions(self) -> int:
        """Vectors that a block works on."""
        return self.tokens + self.class_token


@dataclass(frozen=True, slots=True)
class TextTower:
    layers: int
    width: int
    mlp_width: int
    heads: int
    head_dim: int
    positions: int
    vocabulary: int
    projection: int | None  # None: what is pooled is the vector, without a head


@dataclass(frozen=True, slots=True)
class Decoder:
    """soft_capped: attention scores are, which only the eager backend does. prefix: the prompt
    sees itself in both directions; first_position: the number of its first token."""

    kind: str
    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    soft_capped: bool = False
    prefix: bool = False
    first_position: int = 0


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a picture becomes crops: the resolutions (height, width) a single picture may be
    fitted to, and how many tiles' worth of tokens it may cost at most (None: no limit)."""

    resolutions: tuple[tuple[int, int], ...]
    max_tiles: int | None


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything of a model that follows from its configuration.

    `ties` maps the module path of a parameter to the one it shares its storage with.
    `feature_layers` are indices into the vision tower's hidden states (0 = embeddings) that
    the decoder sees; `first_dropped`: without their first vector, CLIP's class token; `normed`:
    after the tower's last norm.
    """

    blocks: tuple[Block, ...]
    vision: VisionTower | None = None
    text: TextTower | None = None
    decoder: Decoder | None = None
    tiling: Tiling | None = None
    feature_layers: tuple[int, ...] = ()
    first_dropped: bool = False
    normed: bool = False
    ties: Mapping[str, str] = field(default_factory=dict)

    @property
    def crop_tokens(self) -> int:
        """Vectors of one crop that the decoder sees."""
        assert self.vision is not None
        return self.vision.positions - self.first_dropped
