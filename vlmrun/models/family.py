"""What a family of checkpoints is: one row, written in one file of this room."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlmrun.errors import CheckpointError
from vlmrun.models.shapes import Architecture

Config = Mapping[str, Any]
Task = Literal["caption", "embed"]
Detail = Literal["high", "low"]
PromptStyle = Literal["chat", "prefix"]
MOST_LAYERS = 10_000
Phase = Literal["vision", "text", "decode"]


@dataclass(frozen=True, slots=True)
class View:
    """How a job looks at its pictures.

    max_patches: what a NaFlex picture is padded to; dynamic: a tower made for squares is shown
    pictures at their own size.
    """

    detail: Detail = "high"
    max_patches: int | None = None
    dynamic: bool = False


@dataclass(frozen=True, slots=True)
class ImageCost:
    """What one picture costs: crops through the vision tower, tokens in the decoder."""

    crops: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: how its configuration reads, where its tensors lie, what it can do.

    config_type: transformers' model_type, where the family's configurations have one of ours.
    renames: (pattern, replacement) pairs that turn a checkpoint's key into a module path.
    fused: (pattern, replacements) of a module path, after renames, that stands for several by
        equal blocks of rows.
    ignored: patterns of keys that older files carry and no module needs.
    image_processors: those it may be used with, by transformers' names; the first is meant
        where the settings name none.
    image_cost: (architecture, width, height, view) -> ImageCost.
    phases: (architecture, output kind) -> for every phase the blocks that run in it, in order.
        Raises UnsupportedModel for an output kind the model cannot give.
    by_rows, by_columns: patterns of the module paths that tensor parallel cuts so.
    prompt_style: a chat by a template, or PaliGemma's: pictures, start token, prompt, line end.
    image_token_id: of a configuration that leaves it out, as files do what equals the default.
    chat_template: (configuration) -> the template where the folder has none; "" if unknown.
    """

    name: str
    model_types: tuple[str, ...]
    model_class: str
    config_type: str = ""
    task: Task
    architecture: Callable[[Config], Architecture]
    renames: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ignored: tuple[str, ...] = ()
    image_processors: tuple[str, ...]
    image_cost: Callable[[Architecture, int, int, View], ImageCost]
    phases: Callable[[Architecture, str], Mapping[Phase, tuple[str, ...]]]
    image_token_id: int | None = None
    default_prompt: str = ""
    prompt_style: PromptStyle = "chat"
    chat_template: Callable[[Config], str] = lambda _: ""
    by_rows: str = r"layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.(fc1|gate_proj|up_proj))\.\w+$"
    by_columns: str = r"layers\.\d+\.(self_attn\.(out|o)_proj|mlp\.(fc2|down_proj))\.weight$"


def section(config: Config, name: str, defaults: Config, supported: str | None = None) -> Config:
    """A sub-configuration with the class defaults filled in, as transformers does.

    Hub files leave out every value that equals its default.
    """
    given = config.get(name)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise contradiction(f"{name} is not an object")
    kind = given.get("model_type", supported)
    if supported is not None and kind != supported:
        raise contradiction(f"{name}.model_type is {kind!r}, and this family needs {supported!r}")
    return {**defaults, **given}


def number(config: Config, name: str, *, most: int = 1 << 24) -> int:
    """A positive whole number of the configuration, and one that a model can have: a damaged
    one of billions would only be noticed when memory runs out."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise contradiction(f"{name} should be a positive number, not {value!r}")
    if value > most:
        raise contradiction(f"{name} is {value}, more than {most}")
    return value


def contradiction(what: str) -> CheckpointError:
    """The error of a configuration that no model of its family can have."""
    return CheckpointError(f"config.json: {what}", "it is damaged or was edited: download it again")
