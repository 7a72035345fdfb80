"""Reading weights: torch's own conversions, mapped where possible, counted, and never half."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vlmrun.errors import CheckpointError
from vlmrun.models.checkpoints import reading
from vlmrun.models.checkpoints.checkpoint import TensorInfo, read_header
from vlmrun.models.checkpoints.reading import WeightReader

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STAGING = 1000  # numbers, so that small tensors take several pieces


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "STAGING_NUMBERS", STAGING)


def values(count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes that float16 holds: rounding both ways, ties, subnormals, zeros."""
    source = torch.Generator().manual_seed(3)
    exponents = torch.randint(-30, 14, (count,), generator=source)
    drawn = torch.randn(count, generator=source).clamp(-3, 3) * 2.0**exponents
    edges = torch.tensor([0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 6e-8, 2e-8, 65504.0])
    drawn[: len(edges[:count])] = edges[:count]
    return drawn.to(dtype) if dtype != torch.bfloat16 else drawn.clamp(-65280, 65280).to(dtype)


def write(folder: Path, **tensors: Tensor) -> dict[str, TensorInfo]:
    save_file(tensors, folder / "model.safetensors")
    return read_header(folder / "model.safetensors")


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("count", [1, STAGING - 1, STAGING, 2 * STAGING + 1])
def test_conversions_are_torchs(
    tmp_path: Path, stored: torch.dtype, target: torch.dtype, count: int
) -> None:
    tensor = values(count, stored)
    infos = write(tmp_path, before=torch.ones(3), weight=tensor, after=torch.ones(3))
    out = torch.full((count,), torch.nan, dtype=target)
    with WeightReader() as reader:
        reader.read_into(out, infos["weight"], name="weight")
    assert torch.equal(bits(out), bits(tensor.to(target)))


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("rows", [(0, 1), (3, 9), (8, 10), (0, 10)])
def test_rows(
    tmp_path: Path, stored: torch.dtype, target: torch.dtype, rows: tuple[int, int]
) -> None:
    table = values(10 * 301, stored).view(10, 301)
    infos = write(tmp_path, table=table)
    start, stop = rows
    out = torch.empty(stop - start, 301, dtype=target)
    with WeightReader() as reader:
        reader.read_into(out, infos["table"], name="table", rows=rows)
        mapped = reader.map(infos["table"], name="table", rows=rows)
    assert torch.equal(bits(out), bits(table[start:stop].to(target)))
    if mapped is not None:
        assert torch.equal(bits(mapped), bits(table[start:stop]))


def test_gathered_rows_come_in_the_order_asked(tmp_path: Path) -> None:
    table = values(70, torch.float32).view(10, 7)
    infos = write(tmp_path, table=table)
    with WeightReader() as reader:
        found = reader.read_rows(infos["table"], [9, 0, 9, 4], torch.bfloat16, "table")
    assert torch.equal(found, table[[9, 0, 9, 4]].bfloat16())


def test_every_shape(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(2.5),
        "one": torch.tensor([3.5]),
        "four": values(120, torch.float32).view(2, 3, 4, 5),
        "empty": torch.empty(0, 4),
    }
    infos = write(tmp_path, **tensors)
    with WeightReader() as reader:
        for name, tensor in tensors.items():
            out = torch.empty(tensor.shape, dtype=torch.bfloat16)
            reader.read_into(out, infos[name], name=name)
            assert torch.equal(out, tensor.bfloat16())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("large", [65520.0, -1e5, torch.inf, torch.nan])
def test_what_float16_cannot_hold_is_refused(
    tmp_path: Path, stored: torch.dtype, large: float
) -> None:
    tensor = torch.ones(2 * STAGING)
    tensor[-1] = large
    infos = write(tmp_path, fits=torch.ones(4), **{"layers.3.weight": tensor.to(stored)})
    with WeightReader() as reader:
        out = torch.empty(2 * STAGING, dtype=torch.float16)
        with pytest.raises(CheckpointError, match=r"layers\.3\.weight .*float16") as caught:
            reader.read_into(out, infos["layers.3.weight"], name="layers.3.weight")
        assert "--dtype" in caught.value.hint
        reader.read_into(out[:4], infos["fits"], name="fits")


@pytest.mark.parametrize("left_bytes", [0, 100, 5000])
def test_a_file_that_shrinks_is_noticed(tmp_path: Path, left_bytes: int) -> None:
    infos = write(tmp_path, weight=values(2000, torch.float32))
    with WeightReader() as reader:
        out = torch.empty(2000)
        reader.read_into(out, infos["weight"], name="weight")
        os.truncate(tmp_path / "model.safetensors", left_bytes)
        with pytest.raises(CheckpointError, match=r"model\.safetensors ended while weight"):
            reader.read_into(out, infos["weight"], name="weight")
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            reader.map(infos["weight"], name="weight")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    infos = write(tmp_path, weight=torch.ones(4).half())
    (tmp_path / "model.safetensors").unlink()
    with WeightReader() as reader:
        with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
            reader.read_into(torch.empty(4), infos["weight"], name="weight")
        with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
            reader.map(infos["weight"], name="weight")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8, 16])
def test_mapped_only_where_the_address_does(tmp_path: Path, dtype: torch.dtype, shift: int) -> None:
    tensor = values(60, dtype).view(10, 6)
    file = tmp_path / "raw"
    file.write_bytes(bytes(64 + shift) + tensor.view(torch.uint8).numpy().tobytes() + bytes(9))
    spelled = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    info = TensorInfo(spelled, (10, 6), file, 64 + shift)
    with WeightReader() as reader:
        found = reader.map(info, name="raw")
        assert reader.bytes_read == 0
    step = 16 if dtype == torch.float32 else 2
    assert (found is None) == (shift % step != 0)
    if found is not None:  # the mapping outlives its reader
        assert torch.equal(bits(found), bits(tensor))
        assert found.data_ptr() % step == 0


def test_mapped_rows_of_float32_start_on_an_aligned_address(tmp_path: Path) -> None:
    """Rows of 24 bytes: every second one lies on a 16-byte boundary."""
    file = tmp_path / "raw"
    tensor = values(60, torch.float32).view(10, 6)
    file.write_bytes(tensor.numpy().tobytes())
    info = TensorInfo("F32", (10, 6), file, 0)
    with WeightReader() as reader:
        found = [reader.map(info, name="raw", rows=(row, row + 2)) for row in range(9)]
    for row, view in enumerate(found):
        assert (view is None) == (row % 2 == 1)
        if view is not None:
            assert torch.equal(view, tensor[row : row + 2])


def test_a_mapping_is_read_only_and_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    infos = write(tmp_path, weight=torch.ones(4, 4, dtype=torch.float16))
    with WeightReader() as reader:
        found = reader.map(infos["weight"], name="weight")
    assert found is not None
    address = found.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, permissions, *_, name = line.split(maxsplit=5)
        start, stop = (int(part, 16) for part in where.split("-"))
        if start <= address < stop:
            break
    assert permissions == "r--s"
    assert name == str(tmp_path / "model.safetensors")


def test_bytes_are_counted(tmp_path: Path) -> None:
    infos = write(tmp_path, a=torch.ones(5, 100), b=torch.ones(7, dtype=torch.bfloat16))
    with WeightReader() as reader:
        reader.read_into(torch.empty(5, 100, dtype=torch.float16), infos["a"], name="a")
        assert reader.bytes_read == 2000
        reader.read_into(torch.empty(2, 100), infos["a"], name="a", rows=(1, 3))
        assert reader.bytes_read == 2800
        reader.read_rows(infos["a"], [4, 4], torch.float32, "a")
        assert reader.bytes_read == 3600
        reader.read_into(torch.empty(7), infos["b"], name="b")
        assert reader.bytes_read == 3614


def test_closing_closes_the_files(tmp_path: Path) -> None:
    infos = write(tmp_path, weight=torch.ones(4))

    def opened() -> int:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(link) == str(tmp_path / "model.safetensors") for link in links)

    reader = WeightReader()
    reader.read_into(torch.empty(4), infos["weight"], name="weight")
    assert opened() == 1
    reader.close()
    assert opened() == 0


MEASURE = """
import os, sys
from pathlib import Path
import torch
from vlmrun.memory.measure import PeakMemory
from vlmrun.models.checkpoints.checkpoint import read_header
from vlmrun.models.checkpoints.reading import WeightReader

infos = read_header(Path(sys.argv[1]))

def load(reader, target):
    kept = []
    with PeakMemory() as memory:
        before = memory.peak.anon_bytes
        for name, info in infos.items():
            if target == "mapped":
                kept.append(reader.map(info, name=name))
                assert not kept[-1].view(torch.uint8)[::4096].any()
            else:
                kept.append(torch.empty(info.shape, dtype=getattr(torch, target)))
                reader.read_into(kept[-1], info, name=name)
    print(target, memory.peak.anon_bytes - before, flush=True)

for target in "mapped", "float16", "bfloat16", "float32":
    child = os.fork()  # each on a fresh heap, torch imported once
    if not child:
        load(WeightReader(), target)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_loading_takes_the_target_and_one_staging_buffer(tmp_path: Path) -> None:
    """192 MiB of float16, the file sparse: no copy of it, and no detour over float32."""
    header, at, nbytes = {}, 0, 24 << 20
    for i in range(8):
        place = {"shape": [nbytes // 2], "data_offsets": [at, at + nbytes]}
        header[f"layer.{i}"] = {"dtype": "F16", **place}
        at += nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(file, 8 + len(raw) + at)
    command = [sys.executable, "-c", MEASURE, file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken = {target: int(count) for target, count in map(str.split, done.stdout.splitlines())}
    expected = {"mapped": 0, "float16": at, "bfloat16": at, "float32": 2 * at}
    assert taken.keys() == expected.keys()
    for target, nbytes in expected.items():
        assert nbytes * 0.98 <= taken[target] <= nbytes + (12 << 20), target
