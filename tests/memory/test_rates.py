"""What is measured per second: counted right, and told where it cannot be."""

import time

import pytest
import torch

from vlmrun.memory import rates
from vlmrun.memory.rates import fastest, matrix_rate, read_rate

CPU = torch.device("cpu")


def test_the_fastest_step_counts_and_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SECONDS", 0.0)
    naps = iter([0.0, 0.05, 0.02, 0.04])
    assert 0.02 <= fastest(lambda: time.sleep(next(naps)), CPU) < 0.04
    assert next(naps, None) is None


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "fastest", lambda step, device: step() is None or 0.5)
    monkeypatch.setattr(rates, "CPU_SHAPE", (2, 3, 5))
    assert read_rate(torch.ones(1 << 20)).value == 2 * 4 << 20
    assert matrix_rate(torch.float32, CPU).value == 2 * 2 * 2 * 3 * 5


def test_a_product_that_pytorch_has_not_is_no_error() -> None:
    found = matrix_rate(torch.bool, CPU)
    assert (found.name, found.value) == ("matrix_bool", None)
    assert found.words.startswith("PyTorch: ")
