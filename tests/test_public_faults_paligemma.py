"""Faults that people met with PaliGemma elsewhere, each with what is right; numbers are those of
public trackers."""

from pathlib import Path

import pytest
import torch
from entries import Prompted, Ready, load_tiny, noise, plan_tiny, rows_of
from folders import model_at
from light import words
from paligemmas import answers, ask, logits, stock_of, stock_tokens, tokens
from safetensors.torch import load_file
from tiny import write_weights
from tiny_paligemma import GEMMA2, IMAGE, IMAGE_TOKENS, build_paligemma
from torch import Tensor

from vlmrun.errors import UsageError
from vlmrun.memory.workload import decide_compute_dtype
from vlmrun.models.checkpoints.dtype import Dtype
from vlmrun.tasks.decode import Steps, capped, embed_prompts, left_padded


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {
        version: build_paligemma(tmp_path_factory.mktemp("paligemma"), version=version)
        for version in (1, 2)
    }


def hidden_states(ready: Ready, prompt: Prompted, change_last: int | None = None) -> Tensor:
    """What the decoder's norm makes of every position of a prompt: [T, D]."""
    rows = rows_of(ready, [prompt])
    ids, mask = left_padded(rows, 0)
    if change_last is not None:
        ids[0, -1] = change_last
    kept: list[Tensor] = []
    decoder = ready.model.architecture.decoder
    assert decoder is not None
    with torch.inference_mode(), ready.entry.use("decode") as module:
        norm = module.get_submodule("model.language_model.norm")
        hook = norm.register_forward_hook(lambda _m, _a, out: kept.append(out[0]))
        embeds = embed_prompts(module, rows, ids, IMAGE)
        Steps(ready.entry, module, decoder, embeds, mask, 1).prefill(embeds)
        hook.remove()
    [states] = kept
    return states


@pytest.mark.parametrize("version", [1, 2])
def test_f23_the_prompt_sees_itself_in_both_directions(
    folders: dict[int, Path], version: int
) -> None:
    """vllm#26715, #27938, transformers#30967, llama.cpp#7553: run causally, the answers are worse
    and nothing says so. The last token of the prompt changes what the first patch becomes."""
    ready = load_tiny(folders[version], resident="50%")
    prompt = ask(folders[version], "caption en", noise(1))
    one, other = hidden_states(ready, prompt), hidden_states(ready, prompt, change_last=9)
    assert (one[0] - other[0]).abs().max() > 1e-3
    inputs = {name: value for name, value in prompt.stock.items() if name != "labels"}
    with torch.no_grad():
        stock = stock_of(folders[version]).model(**inputs).last_hidden_state[0]
    torch.testing.assert_close(one, stock, atol=5e-5, rtol=0)


@pytest.mark.parametrize("version", [1, 2])
def test_the_answer_sees_backwards_only(folders: dict[int, Path], version: int) -> None:
    """What is said after the prompt never changes what the prompt was: each step's logits are
    those of a run that has no cache."""
    ready = load_tiny(folders[version], resident="50%")
    prompt = ask(folders[version], "caption en", noise(2))
    said = logits(ready, rows_of(ready, [prompt]), steps=6).argmax(dim=-1)[:, 0].tolist()
    assert said == stock_tokens(folders[version], prompt, use_cache=False, max_new_tokens=6)


@pytest.mark.parametrize("version", [1, 2])
def test_positions_start_at_one(folders: dict[int, Path], version: int) -> None:
    """transformers#30967: 0-based positions turn every query and key. In a padded batch, too."""
    ready = load_tiny(folders[version], resident="50%")
    long, short = (ask(folders[version], t, noise(3)) for t in ("answer en where?", "ocr"))
    seen: list[Tensor] = []
    with ready.entry.use("decode") as module:
        rotary = module.get_submodule("model.language_model.rotary_emb")
    hook = rotary.register_forward_pre_hook(
        lambda _m, args, kwargs: seen.append(kwargs.get("position_ids", args[-1])),
        with_kwargs=True,
    )
    logits(ready, rows_of(ready, [long, short]), steps=3)
    hook.remove()
    prompt, first, second = seen
    padding = len(long.ids) - len(short.ids)
    assert prompt[0].tolist() == list(range(1, len(long.ids) + 1))
    assert prompt[1, padding:].tolist() == list(range(1, len(short.ids) + 1))
    assert first[:, 0].tolist() == [len(long.ids) + 1, len(short.ids) + 1]
    assert second[:, 0].tolist() == [len(long.ids) + 2, len(short.ids) + 2]


def test_f22_gemma2_with_padding_gives_no_nan(folders: dict[int, Path]) -> None:
    """transformers#32390: PyTorch's fused attention gives NaN for rows that are all padding, and
    no soft-capping. Rows of a padded batch equal those alone."""
    ready = load_tiny(folders[2], resident="50%")
    texts = ("caption en", "answer en what is to the left of the green pear?", "")
    prompts = [ask(folders[2], text, noise(4)) for text in texts]
    together = logits(ready, rows_of(ready, prompts))
    assert torch.isfinite(together).all()
    for i, prompt in enumerate(prompts):
        alone = logits(ready, rows_of(ready, [prompt]))
        torch.testing.assert_close(together[:, i], alone[:, 0], atol=5e-5, rtol=0)
    with ready.entry.use("decode") as module:
        assert module.model.language_model.config._attn_implementation == "eager"


def test_scores_and_logits_are_soft_capped(tmp_path: Path) -> None:
    """As stock caps them, and the caps are what makes the answer."""
    options = {"version": 2, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    free = build_paligemma(tmp_path / "free", **options)
    bent = build_paligemma(tmp_path / "bent", version=2, final_logit_softcapping=None)
    found = {}
    for folder in free, bent:
        prompt = ask(folder, "caption en", noise(5))
        ready = load_tiny(folder, resident="50%")
        found[folder] = logits(ready, rows_of(ready, [prompt]), steps=1)[0, 0]
        inputs = {name: value for name, value in prompt.stock.items() if name != "labels"}
        with torch.no_grad():
            stock = stock_of(folder)(**inputs).logits[0, -1]
        torch.testing.assert_close(found[folder], stock, atol=1e-4, rtol=0)
    assert (found[free] - found[bent]).abs().max() > 1e-2


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("resident", ["100%", "0%"])
def test_the_embedding_keeps_its_scale_when_it_is_streamed(
    folders: dict[int, Path], version: int, resident: str
) -> None:
    """A subclass of Embedding that multiplies: a plain one in its place ruins every answer."""
    ready = load_tiny(folders[version], resident=resident)
    ids = torch.tensor([[0, 5, 7, 5]])
    with torch.inference_mode(), ready.entry.use("decode") as module:
        found = module.get_submodule("model.language_model.embed_tokens")(ids)
    with torch.no_grad():
        stock = stock_of(folders[version]).get_input_embeddings()(ids)
    assert torch.equal(found, stock)
    table = load_file(folders[version] / "model.safetensors")
    rows = table["language_model.model.embed_tokens.weight"][ids]
    torch.testing.assert_close(found, rows * 32**0.5)


def test_a_tied_head_is_counted_once(folders: dict[int, Path]) -> None:
    """A sum over state_dict() names has the table twice: a gigabyte for Gemma's vocabulary."""
    plan = plan_tiny(model_at(folders[1]))
    stored = load_file(folders[1] / "model.safetensors")
    assert not any("lm_head" in name for name in stored)
    assert plan.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert plan.unused_bytes == {}
    state = stock_of(folders[1]).state_dict()
    table = state["lm_head.weight"].nbytes
    assert sum(tensor.nbytes for tensor in state.values()) == plan.weight_bytes + table


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_f14_float16_weights_are_computed_in_float32(
    folders: dict[int, Path], version: int, device: str
) -> None:
    """transformers#39972, unsloth#4014: Gemma's activations reach 8e5, float16 ends at 65504. On
    a GPU too, and on a CPU that has units for it."""
    model = model_at(folders[version])
    dtype, reason = decide_compute_dtype(model, None, Dtype.float16, device)
    assert dtype is Dtype.float32
    assert "overflows float16" in reason
    for asked in Dtype.float32, Dtype.bfloat16:
        assert decide_compute_dtype(model, asked, Dtype.float16, device)[0] is asked
    with pytest.raises(UsageError) as caught:
        decide_compute_dtype(model, Dtype.float16, Dtype.bfloat16, device)
    assert "--compute-dtype float32 or bfloat16" in words(caught.value)


def test_f14_a_model_that_overflows_float16_is_right(tmp_path: Path) -> None:
    """Residuals of 1e5 and more, as of the real models: their float16 file gives the tokens of
    stock in float32, and no `!!!!`."""
    folder = build_paligemma(tmp_path, dtype="float16")
    stored = load_file(folder / "model.safetensors")
    name = "language_model.model.layers.1.mlp.down_proj.weight"
    stored[name] = stored[name] * 3e4
    write_weights(folder, stored)
    prompt = ask(folder, "caption en", noise(6))
    assert tokens(folder, [prompt], compute="auto") == [stock_tokens(folder, prompt)]
    states: list[float] = []
    ready = load_tiny(folder, compute="auto")
    with ready.entry.use("decode") as module:
        block = module.get_submodule("model.language_model.layers.1")
    block.register_forward_hook(lambda _m, _a, out: states.append(float(out.abs().max())))
    [row] = answers(ready, [prompt])
    assert row.finite
    assert max(states) > 65504


def test_an_overflow_is_not_hidden_by_the_cap() -> None:
    """tanh makes a finite number of an infinite one; the row must end as not finite."""
    found = capped(torch.tensor([torch.inf, -torch.inf, torch.nan, 100.0, 0.0]), 30.0)
    assert found.isfinite().tolist() == [False, False, False, True, True]
    assert found[3] == torch.tanh(torch.tensor(100.0 / 30.0)) * 30.0
    assert torch.equal(capped(found[3:], None), found[3:])


def test_the_largest_picture_fits_no_window(folders: dict[int, Path]) -> None:
    """PaliGemma 2 at 896 has 4096 picture tokens and a window of 4096: the prompt sees itself
    whole in every layer, as stock has it."""
    assert GEMMA2["sliding_window"] < IMAGE_TOKENS
    ready = load_tiny(folders[2], resident="50%")
    prompt = ask(folders[2], "caption en", noise(7))
    one, other = hidden_states(ready, prompt), hidden_states(ready, prompt, change_last=9)
    assert (one - other).abs().amax(dim=-1).min() > 1e-4
