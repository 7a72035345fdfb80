"""What was measured, as Markdown: the marks, then every number with its spread."""

import statistics
from collections.abc import Mapping, Sequence

from peers.comparisons import MARKS, STOCK_FP32, Comparison, Mark
from peers.task import Found

METRICS = {  # name -> heading, how its numbers read
    "first_s": ("first token, s", "{:.2f}"),
    "whole_first_s": ("with loading, s", "{:.2f}"),
    "whole_s": ("whole command, s", "{:.2f}"),
    "tokens_s": ("tokens/s", "{:.2f}"),
    "images_s": ("images/s", "{:.3f}"),
    "cosine": ("least cosine", "{:.6f}"),
    "peak_bytes": ("peak memory, GiB", "{:.2f}"),
}
BOUNDS = {"faster": "≥", "more": "≥", "share": "≤", "later": "≤", "above": ">"}
Results = Mapping[str, Mapping[str, Sequence[Found]]]  # comparison -> label -> a round each


def values(rounds: Sequence[Found], metric: str) -> list[float]:
    scale = 2**30 if metric == "peak_bytes" else 1
    return [found[metric] / scale for found in rounds if metric in found]


def why_none(rounds: Sequence[Found]) -> str:
    """Why a task has no numbers; empty where it has."""
    said = [found[key] for found in rounds for key in ("missing", "error") if key in found]
    return said[0] if said else ""


def marks_table(results: Results) -> list[str]:
    rows = [mark_row(mark, results) for mark in MARKS if mark.comparison in results]
    head = ["| | ours | against | ratio | mark | |", "|---|---|---|---|---|---|"]
    return [*head, *rows]


def mark_row(mark: Mark, results: Results) -> str:
    rounds = results[mark.comparison]
    heading, form = METRICS[mark.metric]
    cells, found = [], []
    for label in (mark.ours, mark.theirs):
        numbers = values(rounds.get(label, ()), mark.metric)
        reason = why_none(rounds.get(label, ())) or "not measured"
        found.append(statistics.median(numbers) if numbers else None)
        cells.append(f"{label}: {form.format(found[-1]) if numbers else reason}")
    unit = " s" if mark.form == "later" else ""
    bound = f"{BOUNDS[mark.form]} {mark.wanted:g}{unit}"
    ratio, verdict = "", ""
    ours, theirs = found
    if ours is not None and (theirs is not None or mark.form == "above"):
        number = reached(mark, ours, theirs or 0.0)
        ratio = f"{number:.6f}" if mark.form == "above" else f"{number:.2f}{unit}"
        verdict = "yes" if meets(mark, number) else "no"
    if mark.form == "above":
        cells[1] = mark.theirs
    return f"| {mark.what} ({heading}) | {' | '.join(cells)} | {ratio} | {bound} | {verdict} |"


def reached(mark: Mark, ours: float, theirs: float) -> float:
    if mark.form == "faster":
        return theirs / ours
    if mark.form == "later":
        return ours - theirs
    return ours if mark.form == "above" else ours / theirs


def meets(mark: Mark, number: float) -> bool:
    if mark.form in ("share", "later"):
        return number <= mark.wanted
    return number > mark.wanted if mark.form == "above" else number >= mark.wanted


def numbers_table(comparison: Comparison, rounds: Mapping[str, Sequence[Found]]) -> list[str]:
    """Medians of a comparison, with the least and the most behind them."""
    known = [metric for metric in METRICS if any(values(each, metric) for each in rounds.values())]
    heads = [METRICS[metric][0] for metric in known]
    lines = [
        f"| {comparison.title} | {' | '.join(heads)} |" if heads else f"| {comparison.title} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for label, each in rounds.items():
        cells = [spread(values(each, metric), METRICS[metric][1]) for metric in known]
        reason = why_none(each)
        if reason:
            cells = [reason, *[""] * (len(known) - 1)]
        lines.append(f"| {' | '.join([label, *cells])} |")
    return lines


def spread(numbers: Sequence[float], form: str) -> str:
    if not numbers:
        return ""
    middle = form.format(statistics.median(numbers))
    if len(numbers) == 1:
        return middle
    return f"{middle} ({form.format(min(numbers))} to {form.format(max(numbers))})"


def agreement(rounds: Mapping[str, Sequence[Found]]) -> str:
    """How many words of a caption, from its start, are those that transformers says in float32;
    empty where there are none. Random weights: two roundings soon lead to other words."""
    said = {label: found[0]["said"].split() for label, found in rounds.items() if said_by(found)}
    wanted = said.pop(STOCK_FP32, [])
    if not wanted or not said:
        return ""
    parts = [f"{label} {alike(wanted, words)} of {len(wanted)}" for label, words in said.items()]
    return f"Words as {STOCK_FP32} says them, up to the first other one: {', '.join(parts)}."


def said_by(found: Sequence[Found]) -> bool:
    return bool(found) and "said" in found[0]


def alike(wanted: Sequence[str], made: Sequence[str]) -> int:
    same = [one == other for one, other in zip(wanted, made, strict=False)]
    return same.index(False) if False in same else len(same)
