#!/usr/bin/env python3
"""Writes tests/goldens.json: what stock transformers makes of the tiny checkpoints, in float32.

    make_goldens.py [--check]

Checkpoints, picture and question are those of tests/golden_cases.py. What timm and open_clip made
is copied from tests/data/timm.json, which scripts/make_timm_goldens.py writes in an environment
of its own. --check writes nothing: exit 1 where an identity differs or a number by more than 2e-5.
"""

import argparse
import json
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import PIL
import torch
import transformers
from torch import Tensor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from golden_cases import (
    CAPTIONERS,
    ENCODERS,
    GOLDENS,
    NEW_TOKENS,
    OPEN_CLIP,
    QUESTION,
    TASK,
    TEXT,
    TIMM,
    numbers,
    picture,
)
from seeded import sha256
from timm_goldens import GOLDENS as MADE_BY_TIMM
from tiny_llava import stock_processor

TOLERANCE = 2e-5
SMALLEST_LEAD = 1e-4  # of a greedy token over the next: less, and another CPU may choose the other
Json = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = goldens()
    if not check:
        GOLDENS.write_text(written(found), encoding="utf-8")
        print(f"{GOLDENS}: {len(found['cases'])} cases")
        return 0
    stored = json.loads(GOLDENS.read_text(encoding="utf-8"))["cases"]
    faults = differences(found["cases"], stored, "")
    print("\n".join(faults) or f"{GOLDENS}: all as it was")
    return int(bool(faults))


@torch.no_grad()
def goldens() -> Json:
    cases: dict[str, Json] = {}
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's
        for at, (name, build) in enumerate({**ENCODERS, **CAPTIONERS}.items()):
            folder = build(Path(root) / str(at))
            cases[name] = (encoder if name in ENCODERS else captioner)(folder)
    cases |= {name: timm_tower(kind) for name, kind in TIMM.items()}
    cases[OPEN_CLIP] = open_clip()
    libraries = torch, transformers, PIL
    return {
        "versions": {kind.__name__: kind.__version__.partition("+")[0] for kind in libraries},
        "versions of timm's cases": MADE_BY_TIMM["versions"],
        "cases": cases,
    }


def encoder(folder: Path) -> Json:
    """The pooled vector and the patches of the picture; of a text, where there is its tower."""
    model = load(folder)
    naflex = model.config.model_type.startswith("siglip2")
    kind = Siglip2ImageProcessorPil if naflex else SiglipImageProcessorPil
    inputs = dict(kind.from_pretrained(folder)(picture(), return_tensors="pt"))
    seen = getattr(model, "vision_model", model)(**inputs)
    states = seen.last_hidden_state[0]
    if naflex:  # vectors of padding mean nothing
        states = states * inputs["pixel_attention_mask"][0][:, None]
    found = {
        "pixels": sha256([inputs["pixel_values"][0]]),
        "pooled": numbers(seen.pooler_output[0]),
        "last-hidden": numbers(states),
    }
    if not hasattr(model, "text_model"):
        return found
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    said = tokenizer([TEXT.lower()], padding="max_length", return_tensors="pt")["input_ids"]
    vector = model.get_text_features(input_ids=said).pooler_output[0]
    return {**found, "text ids": said[0].tolist(), "text": numbers(vector)}


def captioner(folder: Path) -> Json:
    """The picture's features, the prompt's ids and a greedy answer."""
    model = load(folder)
    inputs = asked(folder, model)
    seen = {name: inputs[name] for name in ("pixel_values", "image_sizes") if name in inputs}
    features = model.get_image_features(**seen).pooler_output[0]
    out = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for logits in out.logits:
        first, second = logits[0].topk(2).values.tolist()
        assert first - second > SMALLEST_LEAD, f"{folder}: {first} and {second} are too close"
    prompt = inputs["input_ids"][0].tolist()
    pixels = inputs["pixel_values"].flatten(0, -4)
    return {
        "pixels": sha256([pixels]),
        "features": numbers(features),
        "prompt": prompt,
        "answer": out.sequences[0, len(prompt) :].tolist(),
    }


def asked(folder: Path, model: Any) -> dict[str, Tensor]:
    """What the stock processor makes of the picture and the question."""
    kind = model.config.model_type
    if kind == "paligemma":
        processor = transformers.AutoProcessor.from_pretrained(folder)
        made = processor(images=picture(), text=f"<image>{TASK}", return_tensors="pt")
        return {name: value for name, value in made.items() if name != "labels"}
    said = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": said}],
        chat_template=(folder / "chat_template.jinja").read_text(),
        add_generation_prompt=True,
        tokenize=False,
    )
    if kind != "llava_onevision":
        return dict(stock_processor(folder)(images=picture(), text=rendered, return_tensors="pt"))
    # Its stock processor needs torchvision for videos: here are its parts for pictures.
    pixels = LlavaOnevisionImageProcessorPil.from_pretrained(folder)(picture(), return_tensors="pt")
    seen = {name: pixels[name] for name in ("pixel_values", "image_sizes")}
    [features] = model.get_image_features(**seen).pooler_output
    text = rendered.replace("<image>", "<image>" * len(features))
    return {**seen, **tokenizer(text, return_tensors="pt")}


def load(folder: Path) -> Any:
    [kind] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


def timm_tower(name: str) -> Json:
    """On random pixels; "levels" are those of the picture after timm's crop."""
    golden = MADE_BY_TIMM["models"][name]
    kinds = ["last-hidden"] if name == "gap" else ["pooled", "last-hidden"]
    [levels] = [c["sha256"] for c in MADE_BY_TIMM["crops"] if c["box"] == [0, 0, 192, 120]][:1]
    return {"levels": levels} | {kind: numbers(torch.tensor(golden[kind])) for kind in kinds}


def open_clip() -> Json:
    """On random pixels and ids; "pixels" are those of the picture after open_clip's squash."""
    golden = MADE_BY_TIMM["open_clip"]
    return {
        "pixels": MADE_BY_TIMM["squash"]["sha256"],
        "pooled": numbers(torch.tensor(golden["image"])),
        "text ids": golden["ids"][0],
        "text": numbers(torch.tensor(golden["text"][0])),
    }


def written(found: Json) -> str:
    """JSON with every list of numbers on one line."""

    def line(match: re.Match[str]) -> str:
        return f"[{' '.join(match[1].split())}]"

    return re.sub(r"\[([^\[\]{}]*)\]", line, json.dumps(found, indent=1)) + "\n"


def differences(found: Any, stored: Any, where: str) -> list[str]:
    """Where two trees differ: numbers by more than the tolerance, or anything else at all."""
    if isinstance(found, dict) and isinstance(stored, dict) and found.keys() == stored.keys():
        return [
            line for key in found for line in differences(found[key], stored[key], f"{where}/{key}")
        ]
    if isinstance(found, list) and isinstance(stored, list) and len(found) == len(stored):
        pairs = enumerate(zip(found, stored, strict=True))
        return [line for at, pair in pairs for line in differences(*pair, f"{where}/{at}")]
    if isinstance(found, float) and isinstance(stored, float):
        bound = TOLERANCE * max(1, abs(stored))
        return [] if abs(found - stored) <= bound else [f"{where}: {found}, stored {stored}"]
    return [] if found == stored else [f"{where}: {found}, stored {stored}"]


if __name__ == "__main__":
    sys.exit(main())
