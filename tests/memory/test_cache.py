"""Several models within one budget: who gives way, who does not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from entries import Ready, load_tiny, noise, prompted, rows_of, trace
from torch import Tensor, nn

from vlmrun.errors import OutOfBudget
from vlmrun.memory.cache import ModelCache
from vlmrun.memory.cached_model import CachedModelOnlyFullLoad, CachedModelWithPartialLoad
from vlmrun.tasks.embed import embed_images
from vlmrun.tasks.vision import squares

PIXELS = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.fixture
def siglip(tiny_siglip: Path) -> Ready:
    return load_tiny(tiny_siglip)


@pytest.fixture
def onevision(tiny_onevision: Path) -> Ready:
    return load_tiny(tiny_onevision)


def embed(ready: Ready) -> Tensor:
    groups = list(squares(PIXELS))
    return torch.stack(embed_images(ready.entry, ready.model.architecture, groups, "pooled"))


def caption(ready: Ready) -> Tensor:
    return trace(ready, rows_of(ready, [prompted(ready.model, [noise(1)])]))


def made(entry: CachedModelWithPartialLoad) -> Callable[[], CachedModelWithPartialLoad]:
    return lambda: entry


def full(nbytes: int) -> CachedModelOnlyFullLoad:
    return CachedModelOnlyFullLoad(lambda: nn.Linear(2, 2), nbytes=nbytes, device="cpu")


def test_two_models_with_room_for_one(siglip: Ready, onevision: Ready, tiny_siglip: Path) -> None:
    """The second evicts the first, which streams when it is used again, to the same bits."""
    expected = embed(load_tiny(tiny_siglip)), caption(onevision)
    onevision.entry.shrink(0)
    sizes = siglip.entry.wanted_bytes, onevision.entry.wanted_bytes
    with ModelCache(max(sizes)) as cache:
        for _ in range(3):
            with cache.use("siglip", made(siglip.entry), nbytes=sizes[0]):
                assert torch.equal(embed(siglip), expected[0])
            assert cache.resident_bytes <= cache.budget_bytes
            with cache.use("onevision", made(onevision.entry), nbytes=sizes[1]):
                assert torch.equal(caption(onevision), expected[1])
            assert cache.resident_bytes <= cache.budget_bytes
        assert siglip.entry.resident_bytes < sizes[0]
        assert onevision.entry.resident_bytes > 0


def test_interleaved_use_keeps_what_is_in_use(siglip: Ready, onevision: Ready) -> None:
    """The second model may come only within what the first, in use, leaves of the budget."""
    first, second = siglip.entry.wanted_bytes, onevision.entry.wanted_bytes
    with ModelCache(first + second // 2) as cache:
        with cache.use("siglip", made(siglip.entry), nbytes=first):
            embed(siglip)
            with (
                pytest.raises(OutOfBudget) as caught,
                cache.use("onevision", made(onevision.entry), nbytes=second),
            ):
                pass
            assert siglip.entry.resident_bytes == first
            assert "in use leave" in caught.value.message
            assert "are needed" in caught.value.message
            assert caught.value.exit_code == 4
        with cache.use("onevision", made(onevision.entry), nbytes=second):
            caption(onevision)
        assert siglip.entry.resident_bytes < first


def test_an_entry_in_use_counts_before_its_weights_are_read() -> None:
    """Two full loads, both lent, neither read yet: together they must fit."""
    with (
        ModelCache(150) as cache,
        cache.use("a", lambda: full(100), nbytes=100),
        pytest.raises(OutOfBudget),
        cache.use("b", lambda: full(100), nbytes=100),
    ):
        pass


def test_an_unloaded_entry_needs_room_to_come_back() -> None:
    a, b = full(100), full(100)
    with ModelCache(150) as cache:
        for key, entry, other in (("a", a, b), ("b", b, a), ("a", a, b)):
            with cache.use(key, lambda entry=entry: entry, nbytes=100) as lent, lent.use():
                assert cache.resident_bytes == 100
                assert other.resident_bytes == 0


def test_room_for_both_evicts_nothing() -> None:
    a, b = full(100), full(100)
    with ModelCache(200) as cache:
        for key, entry in ("a", a), ("b", b), ("a", a):
            with cache.use(key, lambda entry=entry: entry, nbytes=100) as lent, lent.use():
                pass
        assert cache.resident_bytes == 200


def test_least_recently_used_goes_first() -> None:
    entries = {key: full(100) for key in "abc"}
    with ModelCache(200) as cache:
        for key in "abac":
            with cache.use(key, lambda key=key: entries[key], nbytes=100) as lent, lent.use():
                pass
        assert [entries[key].resident_bytes for key in "abc"] == [100, 0, 100]


def test_only_as_much_as_is_needed_is_given_back(siglip: Ready) -> None:
    whole = siglip.entry.wanted_bytes
    with ModelCache(whole + 100) as cache:
        with cache.use("siglip", made(siglip.entry), nbytes=whole):
            embed(siglip)
        with cache.use("small", lambda: full(101), nbytes=101) as lent, lent.use():
            assert 0.5 * whole < siglip.entry.resident_bytes < whole


def test_an_entry_is_made_once_and_lent_to_several() -> None:
    count = []

    def make() -> CachedModelOnlyFullLoad:
        count.append(1)
        return full(100)

    with ModelCache(100) as cache:
        with (
            cache.use("a", make, nbytes=100) as outer,
            cache.use("a", make, nbytes=100) as inner,
        ):
            assert outer is inner
        with cache.use("a", make, nbytes=100) as later:
            assert later is outer
    assert len(count) == 1


def test_a_model_larger_than_the_budget_is_refused_before_it_is_made() -> None:
    count = []
    with (
        ModelCache(99) as cache,
        pytest.raises(OutOfBudget, match="99 B, 100 B are needed"),
        cache.use("a", lambda: count.append(1) or full(100), nbytes=100),
    ):
        pass
    assert not count


def test_an_entry_that_was_refused_stays() -> None:
    a, b = full(60), full(60)
    with ModelCache(100) as cache:
        with cache.use("a", lambda: a, nbytes=60) as lent, lent.use():
            pass
        with cache.use("b", lambda: b, nbytes=60) as lent, lent.use():
            with pytest.raises(OutOfBudget), cache.use("a", lambda: a, nbytes=60):
                pass
            assert (a.resident_bytes, b.resident_bytes) == (0, 60)
        with cache.use("a", pytest.fail, nbytes=60) as lent, lent.use():
            assert lent is a


def test_an_error_while_in_use_unlocks() -> None:
    with ModelCache(100) as cache:
        with (
            pytest.raises(ArithmeticError),
            cache.use("a", lambda: full(100), nbytes=100) as lent,
            lent.use(),
        ):
            raise ArithmeticError
        with cache.use("b", lambda: full(100), nbytes=100):
            assert cache.resident_bytes == 0


def test_closing_closes_every_entry(siglip: Ready) -> None:
    entry = full(100)
    with ModelCache(1 << 30) as cache:
        with cache.use("a", lambda: entry, nbytes=100) as lent, lent.use():
            pass
        with cache.use("siglip", made(siglip.entry), nbytes=0):
            embed(siglip)
    assert cache.resident_bytes == 0
    assert (entry.resident_bytes, siglip.entry.resident_bytes) == (0, 0)
