"""Captions from models that vlmrun knows nothing of: loaded whole, run by stock `generate()`.

Asked for by `--allow-untested`. There is no partial residency, no batch, and no plan of the
working memory, which depends on the architecture.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from PIL.Image import Image
from torch import Tensor, nn

from vlmrun.errors import CheckpointError, NotFinite, OutOfBudget, UnsupportedModel, UsageError
from vlmrun.files.rows import Caption, Failure
from vlmrun.job import Job, Placing, Prompt
from vlmrun.memory.budget import Budget, budget_of, find_device, format_bytes, size_flag
from vlmrun.memory.cached_model import CachedModelOnlyFullLoad
from vlmrun.memory.working import GPU_RUNTIME_BYTES, RUNTIME_BYTES
from vlmrun.memory.workload import resolve_compute_dtype
from vlmrun.models.checkpoints.checkpoint import Checkpoint, read_checkpoint
from vlmrun.models.checkpoints.dtype import (
    SAFETENSORS,
    Dtype,
    parse_compute_dtype,
    parse_dtype,
    resolve_dtype,
)
from vlmrun.models.checkpoints.reading import torch_dtype
from vlmrun.models.checkpoints.source import Source
from vlmrun.models.companions import COPY
from vlmrun.models.model import complain
from vlmrun.models.quiet import quiet_transformers
from vlmrun.tasks.processor_files import one_line
from vlmrun.tasks.samples import (
    Batch,
    Sample,
    decode_options,
    failure,
    inputs_of,
    notes_of,
    overflowed,
    read_sample,
)

DEFAULT_PROMPT = "Describe this image."


def open_whole(job: Job, source: Source) -> CachedModelOnlyFullLoad:
    """Decide dtype and device, hold the weights to the budget, and make the cache entry.

    Raises:
        OutOfBudget: the weights alone do not fit.
        UsageError: two dtypes are asked for.
    """
    assert source.folder is not None
    folder, placing = source.folder, job.placing
    checkpoint = read_checkpoint(folder)
    device, _ = find_device(placing.device)
    dtype = choose_dtype(placing, checkpoint, device)
    numbers = sum(info.nbytes // dtype_size(info.dtype) for info in checkpoint.tensors.values())
    nbytes = numbers * dtype.itemsize
    budget = budget_of(placing, device=device)
    check_room(source.name, nbytes, budget, device)
    torch.set_num_threads(budget.threads.count)
    return CachedModelOnlyFullLoad(
        lambda: load_whole(folder, dtype, device), nbytes=nbytes, device=device
    )


def choose_dtype(placing: Placing, checkpoint: Checkpoint, device: str) -> Dtype:
    """The one dtype that weights are stored and computed in.

    Raises:
        UsageError: two are asked for, or int8.
    """
    asked = [parse_dtype(placing.dtype), parse_compute_dtype(placing.compute_dtype)]
    if Dtype.int8 in asked:
        raise UsageError(
            "--dtype int8: an untested model is loaded by transformers, in floats",
            "use float32, bfloat16 or float16",
        )
    found = {dtype for dtype in asked if dtype is not None}
    if len(found) > 1:
        raise UsageError(
            "--dtype and --compute-dtype differ, and an untested model has one for both",
            "give one of them",
        )
    floats = [name for name, info in checkpoint.tensors.items() if info.dtype in SAFETENSORS]
    stored, _ = resolve_dtype(None, checkpoint.stored_bytes(floats))
    dtype, _ = resolve_compute_dtype(next(iter(found), None), stored, device)
    return dtype


def check_room(name: str, nbytes: int, budget: Budget, device: str) -> None:
    """Refuse weights that do not fit by themselves.

    Raises:
        OutOfBudget: they do not; the message gives the smallest budget that holds them.
    """
    tier, room, runtime = "ram", budget.ram_bytes, RUNTIME_BYTES
    if device != "cpu":
        tier, room, runtime = "vram", budget.vram_bytes, GPU_RUNTIME_BYTES
    needed = nbytes + runtime
    if needed > room:
        raise OutOfBudget(
            f"{name} does not fit {format_bytes(room)} of {tier.upper()}: it is untested, so "
            f"loaded whole, and the smallest budget for its weights is {size_flag(needed)}",
            f"use --{tier} {size_flag(needed)} or more, or --dtype bfloat16",
        )


def dtype_size(name: str) -> int:
    return SAFETENSORS[name].itemsize if name in SAFETENSORS else Dtype.float32.itemsize


def load_whole(folder: Path, dtype: Dtype, device: str) -> nn.Module:
    """Load through transformers, without its remarks, and stop where it would only log.

    Raises:
        CheckpointError: tensors are missing or misshapen.
        UnsupportedModel: transformers has no captioning class for this model.
    """
    from transformers import AutoModelForImageTextToText

    try:
        with quiet_transformers(), no_bars():
            module, info = AutoModelForImageTextToText.from_pretrained(
                folder,
                dtype=torch_dtype(dtype),
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are in `info`, by name
                output_loading_info=True,
            )
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        raise UnsupportedModel(
            f"transformers cannot load it: {one_line(error)}", "choose another --model"
        ) from error
    for what, names in (
        ("missing from the checkpoint", sorted(info["missing_keys"])),
        ("of another shape", sorted(name for name, *_ in info["mismatched_keys"])),
    ):
        complain(what, names, "the checkpoint is incomplete, or config.json is of another model")
    loaded: nn.Module = module.to(device).eval()
    return loaded


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep transformers' progress bars off stderr, where they appear without a terminal, too."""
    from transformers.utils import logging  # late: a third of a second

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_processor(folder: Path) -> Any:
    """The stock processor of a folder.

    Raises:
        UnsupportedModel: it needs a package that is not installed, or its own code; or it has
            no chat template, so the prompt's form is not known.
        CheckpointError: the settings of its image processor are missing.
    """
    from transformers import AutoProcessor  # late: as above

    try:
        with quiet_transformers():
            processor = AutoProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # each processor raises its own
        raise UnsupportedModel(
            f"transformers cannot build its processor: {one_line(error)}",
            f"if a file is missing, {COPY}; else choose another --model",
        ) from error
    if not hasattr(processor, "image_processor"):
        raise CheckpointError("preprocessor_config.json or processor_config.json is missing", COPY)
    if not getattr(processor, "chat_template", None):
        raise UnsupportedModel(
            "the model has no chat template, so vlmrun cannot know its prompt",
            "choose another --model",
        )
    return processor


class Finite:
    """Stops `generate()`, as a logits processor, where the arithmetic overflowed: of such logits
    it would make any token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if torch.isnan(scores).any() or torch.isposinf(scores).any():
            raise overflowed()
        return scores


class WholeCaptioner:
    """Captions a job's pictures one at a time."""

    def __init__(self, job: Job, source: Source, entry: CachedModelOnlyFullLoad) -> None:
        assert source.folder is not None
        self._job = job
        self._source = source
        self._entry = entry
        self._processor = load_processor(source.folder)
        self._prompts = job.prompts or (Prompt(DEFAULT_PROMPT),)

    def batches(self) -> Iterator[Batch]:
        options = decode_options(self._job)
        for index, image in enumerate(inputs_of(self._job)):
            found = read_sample(index, image, options, cut=lambda picture: picture)
            if isinstance(found, Failure):
                yield Batch((found,), done=0, failed=1)
                continue
            rows = tuple(self._row(found, prompt) for prompt in self._prompts)
            failed = any(isinstance(row, Failure) for row in rows)
            yield Batch(rows, done=int(not failed), failed=int(failed), notes=notes_of([found]))

    def _row(self, sample: Sample[Image], prompt: Prompt) -> Caption | Failure:
        start = time.perf_counter()
        with self._entry.use() as module:
            try:
                tokens = self._generate(module, sample, prompt.text)
            except NotFinite as error:
                return failure(error, path=sample.path)
            except (RuntimeError, ValueError, TypeError, LookupError, TemplateError) as error:
                raise UnsupportedModel(
                    f"stock generate() fails on {self._source.name}: {one_line(error)}",
                    "it is untested; choose another --model",
                ) from error
            dtype = str(module.dtype).removeprefix("torch.")
        text = self._processor.decode(tokens, skip_special_tokens=True).strip()
        generation = self._job.generation
        return Caption(
            path=sample.path,
            prompt=prompt.text,
            caption=f"{self._job.prefix}{text}{self._job.suffix}",
            model=self._source.name,
            revision=self._source.revision,
            dtype=dtype,
            tokens=len(tokens),
            finish="length" if len(tokens) == generation.max_new_tokens else "stop",
            ms=(time.perf_counter() - start) * 1000,
            sha256=sample.sha256,
            prompt_name=prompt.name,
        )

    @torch.inference_mode()
    def _generate(self, module: nn.Module, sample: Sample[Image], prompt: str) -> Tensor:
        """Token ids of the answer."""
        generation = self._job.generation
        inputs = self._inputs(sample, prompt).to(self._entry.compute_device, module.dtype)
        sampling: dict[str, Any] = {"do_sample": False}
        if generation.temperature > 0:
            torch.manual_seed(generation.seed + sample.index)
            sampling = {
                "do_sample": True,
                "temperature": generation.temperature,
                "top_p": generation.top_p,
                "top_k": generation.top_k,
            }
        with quiet_transformers():
            out = module.generate(  # type: ignore[operator]
                **inputs,
                max_new_tokens=generation.max_new_tokens,
                logits_processor=[Finite()],
                **sampling,
            )
        answer: Tensor = out[0, inputs["input_ids"].shape[1] :]
        return answer

    def _inputs(self, sample: Sample[Image], prompt: str) -> Any:
        """The processor's, which knows whether the template writes the start token itself."""
        image = {"type": "image", "image": sample.pixels}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [image, {"type": "text", "text": prompt}]}
        ]
        if self._job.system:
            system = [{"type": "text", "text": self._job.system}]
            messages.insert(0, {"role": "system", "content": system})
        return self._processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
