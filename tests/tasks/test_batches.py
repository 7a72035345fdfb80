"""Batches of pictures that cost alike, read ahead by one thread, and rows in input order."""

import json
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command, result, runner
from entries import noise
from PIL import Image

from vlmrun.errors import CheckpointError
from vlmrun.files.inputs import ImageInput
from vlmrun.files.rows import Failure
from vlmrun.tasks import captioner, embedder
from vlmrun.tasks.batches import (
    WINDOW,
    Finished,
    InTurn,
    Numbered,
    Reading,
    alike,
    batch_of,
    overlapped,
)
from vlmrun.tasks.samples import Sample, batched

# The tiny OneVision makes of these 21, 33, 37, 65 and 69 tokens and some between.
SIZES = ((28, 28), (90, 20), (20, 90), (56, 56), (9, 7), (100, 99), (30, 55), (55, 30), (40, 21))
FLOAT32 = ("--compute-dtype", "float32")


@pytest.fixture
def vlmrun(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Command:
    return runner(monkeypatch, capfdbinary)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of many shapes; some cannot be read, one of them with a header that says its size."""
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{at:02}.png" for at in range(24)]
    for at, path in enumerate(paths):
        noise(at, *SIZES[at % len(SIZES)]).save(path)
    paths[3].write_bytes(paths[3].read_bytes()[:300])
    paths[10].write_bytes(b"no picture")
    return [*paths[:14], paths[2], folder / "nowhere.png", *paths[14:]]


def numbered(count: int) -> list[Numbered]:
    return [(at, ImageInput(str(at))) for at in range(count)]


def places(groups: Iterator[list[Numbered]]) -> list[list[int]]:
    return [[place for place, _ in group] for group in groups]


def test_pictures_that_cost_alike_run_together() -> None:
    costs = [9, 1, 5, 9, 1, 5, 9, 1]
    groups = alike(numbered(8), 3, lambda image: costs[int(image.path)])
    assert places(groups) == [[0, 2, 5], [1, 4, 7], [3, 6]]


def test_pictures_that_cost_the_same_keep_their_order() -> None:
    assert places(alike(numbered(7), 3, lambda image: 5)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_single_batch_needs_no_cost() -> None:
    def never(image: ImageInput) -> int:
        raise AssertionError("a header was read")

    assert places(alike(numbered(3), 3, never)) == [[0, 1, 2]]


def test_no_picture_leaves_its_window_and_the_first_that_is_left_comes_next() -> None:
    source, size, asked = random.Random(3), 3, []

    def cost(image: ImageInput) -> int:
        asked.append(int(image.path))
        return source.randint(1, 99)

    groups = alike(numbered(50), size, cost)
    seen: set[int] = set()
    for at, group in enumerate(groups):
        window = at // WINDOW
        assert all(place // (size * WINDOW) == window for place, _ in group)
        assert min(set(range(50)) - seen) == group[0][0]
        assert max(asked) < size * WINDOW * (window + 1)  # no header before it is needed
        seen.update(place for place, _ in group)
    assert seen == set(range(50))
    assert sorted(asked) == list(range(48))  # the last window is one batch


def finished(place: int, *, fails: bool = False) -> tuple[int, Finished]:
    row = Failure(str(place), None, "ImageError" if fails else "none", "")
    return place, Finished((row,), (f"note {place}",))


def test_rows_come_in_input_order_and_something_after_every_batch() -> None:
    groups = [[5, 0], [4, 1, 2], [3], [6]]
    order = InTurn()
    turns = [order.take([finished(place) for place in group]) for group in groups]
    found = [[int(row.path or "") for row in turn.rows] for turn in turns]
    assert found == [[0], [1, 2], [3, 4, 5], [6]]
    assert [turn.failed for turn in turns] == [1, 2, 3, 1]  # counted when they are written
    assert turns[2].notes == ("note 3", "note 4", "note 5")


def test_a_run_that_ends_writes_what_waits() -> None:
    order = InTurn()
    order.take([finished(5), finished(0), finished(3)])
    assert [row.path for row in order.rest().rows] == ["3", "5"]
    assert order.rest().rows == ()


def test_a_picture_fails_where_one_of_its_rows_does() -> None:
    failure = Failure("x", None, "NotFinite", "")
    assert (batch_of([Finished((failure, failure))]).failed, batch_of([]).done) == (1, 0)


class Pixels:
    """Something that can be watched while it goes."""


def sample(index: int, pixels: Any = None) -> Sample[Any]:
    return Sample(index, str(index), "", (), pixels)


def runs(
    count: int,
    read: Callable[[int, ImageInput], Sample[Any] | Failure],
    run: Callable[[Reading[Any]], Any],
    *,
    size: int = 2,
) -> Iterator[Any]:
    return overlapped(batched(numbered(count), size), read, run, count=-(-count // size))


def test_the_next_batch_is_read_while_one_runs_and_no_further() -> None:
    """By one thread; and the pixels of a batch are gone before the one after the next is read."""
    alive: weakref.WeakSet[Pixels] = weakref.WeakSet()
    threads, most, ready = {}, [], threading.Semaphore(0)

    def read(index: int, image: ImageInput) -> Sample[Pixels]:
        threads[index] = threading.current_thread()
        pixels = Pixels()
        alive.add(pixels)
        most.append(len(alive))
        if index % 2:
            ready.release()
        return sample(index, pixels)

    def run(reading: Reading[Pixels]) -> list[int]:
        assert ready.acquire(timeout=10)  # this batch; then the next, before this one ends
        if reading.places[0] < 6:
            assert ready.acquire(timeout=10)
            ready.release()
        time.sleep(0.02)  # a third batch would be read now
        assert len(alive) <= 4
        return [found.index for found in reading.found if isinstance(found, Sample)]

    assert list(runs(8, read, run)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert max(most) <= 4
    assert {threads[0], threads[1]} == {threading.main_thread()}
    assert len({threads[at] for at in range(2, 8)}) == 1
    assert threads[2] is not threading.main_thread()
    assert not threads[2].is_alive()
    assert not alive


def test_a_single_batch_starts_no_thread() -> None:
    before = threading.active_count()

    def run(reading: Reading[Any]) -> int:
        return threading.active_count()

    assert list(runs(2, lambda index, image: sample(index), run)) == [before]
    assert list(runs(0, lambda index, image: sample(index), run)) == []


def test_what_goes_wrong_in_the_thread_is_told_in_its_turn() -> None:
    def read(index: int, image: ImageInput) -> Sample[Any]:
        if index == 3:
            raise ZeroDivisionError
        return sample(index)

    steps = runs(6, read, lambda reading: reading.places)
    assert next(steps) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        next(steps)


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_a_run_that_ends_early_waits_for_one_picture_at_most(how: str) -> None:
    started, go_on, read_at = threading.Event(), threading.Event(), []

    def read(index: int, image: ImageInput) -> Sample[Any]:
        read_at.append(index)
        if index == 4:
            started.set()
            assert go_on.wait(timeout=10)
        return sample(index)

    def run(reading: Reading[Any]) -> tuple[int, ...]:
        if reading.places[0] == 0:
            assert started.wait(timeout=10)
            threading.Timer(0.05, go_on.set).start()
            if how == "failed":
                raise KeyboardInterrupt
        return reading.places

    steps = runs(12, read, run, size=4)
    if how == "failed":
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    else:
        next(steps)
        steps.close()  # type: ignore[attr-defined]
    assert read_at == [0, 1, 2, 3, 4]
    assert not [each for each in threading.enumerate() if "vlmrun-pictures" in each.name]


def test_each_picture_has_its_share_of_what_its_batch_took() -> None:
    """Waiting for a batch counts; what was read behind another batch does not."""

    def read(index: int, image: ImageInput) -> Sample[Any]:
        time.sleep(0.05)
        return sample(index)

    def run(reading: Reading[Any]) -> float:
        time.sleep(0.2)
        return reading.ms_each()

    first, second = runs(4, read, run)
    assert first >= 149
    assert 99 <= second < first


def caption(vlmrun: Command, folder: Path, *argv: object) -> list[dict[str, Any]]:
    argv = ("caption", "-m", folder, "--json", "--max-new-tokens", "6", *FLOAT32, *argv)
    return [result(row) for row in vlmrun(*argv).rows]


def padding(batches: list[list[int]]) -> int:
    return sum(max(batch) - length for batch in batches for length in batch)


def test_sorted_batches_give_what_each_picture_gives(
    vlmrun: Command,
    tiny_onevision: Path,
    pictures: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice the same picture, some that cannot be read: rows in input order, less padding."""
    decode, lengths = captioner.decode, []

    def counted(*args: Any, **options: Any) -> Any:
        lengths.append([len(row.input_ids) for row in args[2]])
        return decode(*args, **options)

    monkeypatch.setattr(captioner, "decode", counted)
    alone = caption(vlmrun, tiny_onevision, "-b", "1", *pictures)
    assert [row["path"] for row in alone] == list(map(str, pictures))
    assert [at for at, row in enumerate(alone) if "error" in row] == [3, 10, 15]
    assert len({row["caption"] for row in alone if "caption" in row}) > 15
    in_order = list(batched([length for [length] in lengths], 4))
    lengths.clear()
    assert caption(vlmrun, tiny_onevision, "-b", "4", *pictures) == alone
    assert sum(map(len, lengths)) == 23
    assert padding(lengths) < 0.5 * padding(in_order)
    lengths.clear()
    caption(vlmrun, tiny_onevision, "-b", "4", "--detail", "low", *pictures)
    assert [len(batch) for batch in lengths] == [3, 4, 3, 3, 4, 4, 2]  # in the order given


def test_a_failure_ends_a_sorted_run_after_what_comes_before_it(
    vlmrun: Command, tiny_onevision: Path, pictures: list[Path]
) -> None:
    argv = ("caption", "-m", tiny_onevision, "--json", "--max-new-tokens", "2", "--fail-fast")
    done = vlmrun(*argv, "-b", "2", *pictures)
    paths = [row["path"] for row in done.rows]
    assert paths[:4] == list(map(str, pictures[:4]))
    assert "error" in done.rows[3]
    # what else of the window was finished follows, in input order
    at = [list(map(str, pictures)).index(path) for path in paths]
    assert at == sorted(at)
    assert 3 < at[-1] < 2 * WINDOW
    assert done.code == 3
    failed = sum("error" in row for row in done.rows)
    told = f"{len(paths) - failed} done, {failed} failed, {26 - len(paths)} not tried\n"
    assert done.err.endswith(f"vlmrun: {told}")


@pytest.mark.parametrize("error", [MemoryError("x"), CheckpointError("x", "y")])
def test_a_run_that_an_error_ends_writes_what_waits(
    error: Exception,
    vlmrun: Command,
    tiny_onevision: Path,
    pictures: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished: list[int] = []
    finish = captioner.Captioner._finish

    def fail_third(self: captioner.Captioner, reading: Reading[Any]) -> list[tuple[int, Finished]]:
        if len(finished) >= 6:
            raise error
        made = finish(self, reading)
        finished.extend(place for place, _ in made)
        return made

    monkeypatch.setattr(captioner.Captioner, "_finish", fail_third)
    argv = ("caption", "-m", tiny_onevision, "--json", "--max-new-tokens", "2", "-b", "3")
    done = vlmrun(*argv, *pictures)
    assert done.code == 1
    assert [row["path"] for row in done.rows] == [str(pictures[at]) for at in sorted(finished)]
    assert sorted(finished) != list(range(len(finished)))  # one has waited


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_prompts_of_a_picture_share_one_look_at_it(
    vlmrun: Command,
    tiny_onevision: Path,
    pictures: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
) -> None:
    """As many as fit a batch or more; the answers are those of each prompt asked alone."""
    prompts = ["what is it?", "describe this image, please, in many words.", "a dog?"]
    few = pictures[:3]
    asked = [caption(vlmrun, tiny_onevision, "-p", prompt, *few) for prompt in prompts]
    expected = [rows[at] for at in range(3) for rows in asked]
    assert len({row["caption"] for row in expected}) > 5
    encode, seen = captioner.encode_pictures, []

    def counted(entry: Any, architecture: Any, batch: Any) -> Any:
        seen.extend(batch)
        return encode(entry, architecture, batch)

    monkeypatch.setattr(captioner, "encode_pictures", counted)
    decode, lengths = captioner.decode, []

    def measured(*args: Any, **options: Any) -> Any:
        lengths.append([len(row.input_ids) for row in args[2]])
        return decode(*args, **options)

    monkeypatch.setattr(captioner, "decode", measured)
    flags = [word for prompt in prompts for word in ("-p", prompt)]
    assert caption(vlmrun, tiny_onevision, "-b", batch, *flags, *few) == expected
    assert len(seen) == 3
    if batch == 2:  # of a picture's three rows the two shorter ones run together
        assert [len(rows) for rows in lengths] == [2, 1] * 3
        assert all(max(short) <= long for short, [long] in batched(lengths, 2))


@pytest.mark.parametrize("flags", [(), ("--dynamic-size",)])
def test_a_picture_that_comes_twice_in_a_batch_is_embedded_once(
    vlmrun: Command,
    tiny_siglip_vision: Path,
    pictures: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: tuple[str, ...],
) -> None:
    copy = tmp_path / "copy.png"
    copy.write_bytes(pictures[0].read_bytes())
    shown = [pictures[0], pictures[1], copy, pictures[9], pictures[1], pictures[0]]
    argv = ("embed", "-m", tiny_siglip_vision, "--json", *FLOAT32, *flags)
    alone = [vlmrun(*argv, each).rows[0] for each in shown]
    passed, embed = [], embedder.embed_images

    def counted(entry: Any, architecture: Any, groups: Any, kind: str) -> Any:
        groups = list(groups)
        passed.append([len(group.inputs[0]) for group in groups])
        return embed(entry, architecture, groups, kind)

    monkeypatch.setattr(embedder, "embed_images", counted)
    rows = vlmrun(*argv, "-b", "6", *shown).rows
    # at its own size, a picture shares its group with those of its shape, wherever they stand
    assert passed == [[3] if not flags else [1, 2]]
    assert [row["path"] for row in rows] == list(map(str, shown))
    for row, expected in zip(rows, alone, strict=True):
        assert row["sha256"] == expected["sha256"]
        vectors = (torch.tensor(each["embedding"]) for each in (row, expected))
        torch.testing.assert_close(*vectors, atol=2e-6, rtol=0)


def test_a_batch_of_failures_leaves_the_model_alone(
    vlmrun: Command, tiny_siglip_vision: Path, tiny_onevision: Path, pictures: list[Path]
) -> None:
    for command, folder in ("embed", tiny_siglip_vision), ("caption", tiny_onevision):
        argv = (command, "-m", folder, "--resident", "0%", "--stats", "--json", "-b", "1")
        done = vlmrun(*argv, pictures[3], pictures[10])
        assert done.code == 1
        assert json.loads(done.err.splitlines()[-1])["measured"]["disk_bytes_read"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_batches_of_a_trained_model(vlmrun: Command, tmp_path: Path, dtype: str) -> None:
    """Whatever the dtype, a picture gives the same caption alone and in a padded batch."""
    shown = [*sorted((Path(captioner.__file__).parents[1] / "data/pictures").glob("*.png"))]
    wide = tmp_path / "wide.png"
    with Image.open(shown[0]) as picture:
        picture.crop((0, 0, picture.width, picture.height // 3)).save(wide)
    shown.insert(3, wide)
    argv = ("caption", "-m", "demo", "--json", "--dtype", dtype)
    alone, together = (vlmrun(*argv, "-b", b, *shown).rows for b in (1, 4))
    assert [*map(result, together)] == [*map(result, alone)]
    assert len({row["caption"] for row in alone}) > 5
