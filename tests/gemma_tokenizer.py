"""SigLIP 2's tokenizer as the hub's files have it."""

from pathlib import Path

from folders import Change, setting, without
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors


def gemma(lower: bool | None) -> Change:
    """SigLIP 2's tokenizer as the hub has it: Gemma's, which keeps case and pads on the left."""

    def change(folder: Path) -> None:
        special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
        letters = [*map(chr, range(33, 127)), "▁", *"ΟΔΣοδσς"]
        pieces = {piece: at for at, piece in enumerate([*special, *letters])}
        tokenizer = Tokenizer(models.BPE(pieces, [], unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.add_special_tokens(special)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <eos>", special_tokens=[("<eos>", 1)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        without("tokenizer_config.json")(folder)
        named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
        kind = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": False, "add_eos_token": True}
        setting("tokenizer_config.json", do_lower_case=lower, **kind, **named)(folder)

    return change
