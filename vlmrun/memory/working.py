"""Working memory of a job, from the shapes: what a phase needs besides the weights.

Every figure is an upper bound of what was measured; `--stats` prints both. Factors count the
tensors that are alive at once in the widest moment of a phase.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.models.family import ImageCost, Phase
from vlmrun.models.shapes import Architecture

RUNTIME_BYTES = 460 << 20  # interpreter, torch, transformers, tokenizer code; measured
COMPILED_BYTES = 90 << 20  # numba, and its compiler in the first run; measured
CALL_BYTES = 45 << 20  # the compiler of a decoder's step, in the first run; measured
GPU_RUNTIME_RAM_BYTES = 2 << 30  # the same with CUDA's libraries mapped
GPU_RUNTIME_BYTES = 600 << 20  # CUDA context and its libraries' workspaces
TOKEN_ENTRY_BYTES = 1_000  # of tokenizer tables per vocabulary entry; measured
CROPS_AT_ONCE = 4  # crops that pass through a vision block together
TEXTS_AT_ONCE = 16
SCRATCH_BYTES = 24 << 20  # conversion tiles and read buffers
SCORE_BYTES = 10  # of eager attention, for every query, key and head; measured
DECODED_PIXEL_BYTES = 20  # per pixel between file and model; JPEG 2000 takes most, measured


@dataclass(frozen=True, slots=True)
class Workload:
    """What a job asks of a model: its phases, and the largest of everything it will meet.

    prompt_tokens: upper bound of one row's tokens besides the picture's.
    picture_known: false where no picture was named and one of the tower's size is assumed.
    """

    phases: Mapping[Phase, tuple[str, ...]]
    count: int
    image: ImageCost
    image_pixels: int
    prompt_tokens: int = 0
    new_tokens: int = 0
    batch_size: int = 1
    batch_reason: str = ""
    picture_known: bool = True

    @property
    def crops(self) -> int:
        """Crops of one batch."""
        return self.batch_size * self.image.crops

    @property
    def crops_ahead(self) -> int:
        """Crops of the next batch, which is read while one runs."""
        left = max(0, self.count - self.batch_size)
        return min(left, self.batch_size) * self.image.crops

    def crop_tokens(self, architecture: Architecture) -> int:
        """Vectors of one crop that a vision block works on. A decoder's pictures are cut to the
        tower's squares; without one, all tokens of a picture are those of its only crop."""
        assert architecture.vision is not None
        if architecture.decoder is not None:
            return architecture.vision.positions
        return self.image.tokens

    @property
    def prefill_tokens(self) -> int:
        """Positions of the longest row before the first new token."""
        return self.image.tokens + self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Working:
    """Bytes beside the weights. On a GPU, activations and KV lie there, the rest in RAM."""

    runtime_bytes: int
    picture_bytes: int  # decoded pictures and pixel values, always in RAM
    activation_bytes: Mapping[Phase, int]
    kv_bytes: int

    def phase_bytes(self, phase: Phase) -> int:
        """Activations of a phase; decoding keeps its KV cache beside them."""
        return self.activation_bytes[phase] + (self.kv_bytes if phase == "decode" else 0)


def working_memory(
    architecture: Architecture,
    load: Workload,
    compute: Dtype,
    *,
    device: str,
    compiled: bool = False,
    eager: frozenset[Phase] = frozenset(),
) -> Working:
    """Compute the working memory of every phase of a workload; in those that are `eager`, the
    attention scores of one block lie in memory; `compiled`: products are by our loops."""
    activations: dict[Phase, int] = {}
    if "vision" in load.phases:
        activations["vision"] = vision_bytes(architecture, load, compute)
    if "text" in load.phases:
        activations["text"] = text_bytes(architecture, load, compute)
    if "decode" in load.phases:
        activations["decode"] = decode_bytes(architecture, load, compute)
    for phase in eager & activations.keys():
        activations[phase] += SCORE_BYTES * scores(architecture, load, phase)
    runtime = RUNTIME_BYTES if device == "cpu" else GPU_RUNTIME_RAM_BYTES
    runtime += (COMPILED_BYTES + CALL_BYTES * ("decode" in load.phases)) * compiled
    return Working(
        runtime_bytes=runtime + TOKEN_ENTRY_BYTES * vocabulary(architecture, load),
        picture_bytes=picture_bytes(architecture, load),
        activation_bytes=activations,
        kv_bytes=kv_bytes(architecture, load, compute),
    )


def vocabulary(architecture: Architecture, load: Workload) -> int:
    """Entries of the tokenizer the job loads."""
    if architecture.decoder is not None:
        return architecture.decoder.vocabulary
    if architecture.text is not None and "text" in load.phases:
        return architecture.text.vocabulary
    return 0


def picture_bytes(architecture: Architecture, load: Workload) -> int:
    """One picture that is decoded, the pixels of a batch and of the next one, and those of the
    crops that pass the embeddings together."""
    vision = architecture.vision
    if vision is None or "vision" not in load.phases:
        return 0
    pixels = max(vision.image_size**2, load.crop_tokens(architecture) * vision.patch_size**2)
    crop = vision.channels * pixels * Dtype.float32.itemsize
    together = 2 * min(load.crops, CROPS_AT_ONCE)  # side by side, then in the compute dtype
    crops = load.crops + load.crops_ahead + together
    return DECODED_PIXEL_BYTES * load.image_pixels + crops * crop


def vision_bytes(architecture: Architecture, load: Workload, compute: Dtype) -> int:
    """Hidden states of all crops, one group of crops inside a block, packed features."""
    vision = architecture.vision
    assert vision is not None
    each = load.crop_tokens(architecture)
    tokens = load.crops * each
    group = min(load.crops, CROPS_AT_ONCE) * each
    kept = max(1, len(architecture.feature_layers))  # held apart, then side by side
    numbers = tokens * vision.width * 2 * kept + group * (6 * vision.width + 2 * vision.mlp_width)
    if vision.naflex:  # masks, kept for all groups and converted for one
        numbers += 2 * tokens * each
    if architecture.decoder is not None:
        numbers += 4 * tokens * architecture.decoder.width
    return numbers * compute.itemsize + SCRATCH_BYTES


def text_bytes(architecture: Architecture, load: Workload, compute: Dtype) -> int:
    text = architecture.text
    assert text is not None
    group = min(load.batch_size, TEXTS_AT_ONCE) * text.positions
    return group * (8 * text.width + 2 * text.mlp_width) * compute.itemsize + SCRATCH_BYTES


def decode_bytes(architecture: Architecture, load: Workload, compute: Dtype) -> int:
    """Prefill of the whole batch: hidden states, one block inside, mask, last logits."""
    decoder = architecture.decoder
    assert decoder is not None
    tokens = load.batch_size * load.prefill_tokens
    attention = decoder.heads * decoder.head_dim
    numbers = tokens * (5 * decoder.width + 4 * attention + 3 * decoder.mlp_width)
    if load.batch_size > 1 or decoder.prefix:  # rows of different length, or both directions
        numbers += 2 * tokens * load.prefill_tokens
    logits = 4 * load.batch_size * decoder.vocabulary * Dtype.float32.itemsize
    return numbers * compute.itemsize + logits + SCRATCH_BYTES


def scores(architecture: Architecture, load: Workload, phase: Phase) -> int:
    """Attention scores of one block and what passes it together, the mask as one more head."""
    if phase == "decode":
        assert architecture.decoder is not None
        return (architecture.decoder.heads + 1) * load.batch_size * load.prefill_tokens**2
    if phase == "text":
        assert architecture.text is not None
        rows, positions = min(load.batch_size, TEXTS_AT_ONCE), architecture.text.positions
        return architecture.text.heads * rows * positions**2
    assert architecture.vision is not None
    rows, positions = min(load.crops, CROPS_AT_ONCE), load.crop_tokens(architecture)
    return architecture.vision.heads * rows * positions**2


def kv_bytes(architecture: Architecture, load: Workload, compute: Dtype) -> int:
    """Keys and values of every decoder block, for prompt and new tokens."""
    decoder = architecture.decoder
    if decoder is None or "decode" not in load.phases:
        return 0
    positions = load.batch_size * (load.prefill_tokens + load.new_tokens)
    per_token = 2 * decoder.layers * decoder.kv_heads * decoder.head_dim
    return positions * per_token * compute.itemsize
