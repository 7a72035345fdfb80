"""Streamed layers are named in short."""

import pytest

from vlmrun.cli.statistics import name_ranges


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["projector"], "projector"),
        (["decoder.layers.3", "decoder.layers.4", "decoder.layers.5"], "decoder.layers.3-5"),
        (["a.layers.9", "a.layers.10", "a.layers.2", "head.0"], "a.layers.2,9-10, head.0"),
    ],
)
def test_runs_of_layers_are_drawn_together(names: list[str], text: str) -> None:
    assert name_ranges(names) == text
