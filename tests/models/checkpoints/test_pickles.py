"""Pickled weight files: read as torch reads them, and never run."""

import collections
import contextlib
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from light import words
from torch import Tensor, nn

from vlmrun.errors import CheckpointError, UnsupportedModel, VlmrunError
from vlmrun.models.checkpoints.checkpoint import ITEMSIZES, read_checkpoint
from vlmrun.models.checkpoints.file_names import PICKLE, PICKLE_INDEX
from vlmrun.models.checkpoints.pickles import LEGACY, MAX_PICKLE_BYTES, PickledTensor, read_pickle
from vlmrun.models.checkpoints.reading import WeightReader

pytestmark = pytest.mark.usefixtures("here")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def size_of(tensor: PickledTensor) -> int:
    return math.prod(tensor.shape) * ITEMSIZES[tensor.dtype]


def refused(path: Path) -> VlmrunError:
    with pytest.raises(VlmrunError) as caught:
        read_pickle(path)
    assert path.name in words(caught.value)
    return caught.value


def repacked(
    path: Path, change: Callable[[str, bytes], bytes | None], *, compression: int = 0
) -> Path:
    """Write the zip again, entry by entry; None leaves one out."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            data_or_none = change(name, data)
            if data_or_none is not None:
                archive.writestr(name, data_or_none)
    return path


def with_program(path: Path, program: bytes) -> Path:
    torch.save({"weight": draw(4)}, path)
    return repacked(path, lambda name, data: program if name.endswith("data.pkl") else data)


class TestReading:
    @pytest.mark.parametrize("protocol", [2, 4, 5])
    @pytest.mark.parametrize("target", DTYPES)
    def test_every_dtype_is_read_as_it_was_saved(
        self, protocol: int, target: torch.dtype, tmp_path: Path
    ) -> None:
        tensors = {str(dtype): draw(5, 7, dtype=dtype) for dtype in DTYPES}
        tensors |= {"scalar": draw(), "none": draw(0, 4), "position_ids": torch.arange(9)[None]}
        torch.save(tensors, tmp_path / PICKLE, pickle_protocol=protocol)
        found = read_checkpoint(tmp_path)
        assert list(found.tensors) == list(tensors)
        assert found.tensors["position_ids"].dtype == "I64"
        del tensors["position_ids"]  # of a dtype that is not for weights
        with WeightReader() as reader:
            for name, tensor in tensors.items():
                out = torch.empty(tensor.shape, dtype=target)
                reader.read_into(out, found.tensors[name], name=name)
                assert torch.equal(out, tensor.to(target))
                if tensor.dim() == 2 and tensor.numel():
                    mapped = reader.map(found.tensors[name], name=name)
                    assert mapped is not None  # torch puts storages on 64-byte boundaries
                    assert torch.equal(mapped, tensor)

    def test_views_of_one_storage(self, tmp_path: Path) -> None:
        table = draw(10, 6)
        views = {"whole": table, "rows": table[3:5], "row": table[9], "tied": table}
        torch.save(views, tmp_path / PICKLE)
        found = read_checkpoint(tmp_path).tensors
        assert found["whole"].offset == found["tied"].offset
        assert (tmp_path / PICKLE).stat().st_size < 2 * table.nbytes + 2000
        with WeightReader() as reader:
            for name, view in views.items():
                out = torch.empty(view.shape)
                reader.read_into(out, found[name], name=name)
                assert torch.equal(out, view)

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_a_module_s_state_dict(self, wrapped: bool, tmp_path: Path) -> None:
        """With `_metadata`, parameters, and wrapped as training frameworks write it."""
        module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        state: dict[str, Any] = module.state_dict(keep_vars=True)
        torch.save({"state_dict": state, "epoch": 3, "by": "me"} if wrapped else state, "m.bin")
        found = read_pickle(Path("m.bin"))
        assert {name: t.shape for name, t in found.items()} == {
            name: tuple(parameter.shape) for name, parameter in module.named_parameters()
        }
        data = Path("m.bin").read_bytes()
        for name, parameter in module.named_parameters():
            stored = parameter.detach().numpy().tobytes()
            assert data[found[name].offset :][: len(stored)] == stored

    def test_numbers_and_texts_are_left_out(self, tmp_path: Path) -> None:
        plain = {"a": draw(2), "n": 3, "x": 0.5, "s": "text", "t": True, "nothing": None}
        torch.save(plain, tmp_path / PICKLE)
        assert list(read_pickle(tmp_path / PICKLE)) == ["a"]

    def test_shards(self, tmp_path: Path) -> None:
        one, two = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
        tensors = {"a": draw(3), "b": draw(2, 2, dtype=torch.float16)}
        torch.save({"a": tensors["a"]}, tmp_path / one)
        torch.save({"b": tensors["b"]}, tmp_path / two)
        (tmp_path / PICKLE_INDEX).write_text(f'{{"weight_map": {{"a": "{one}", "b": "{two}"}}}}')
        found = read_checkpoint(tmp_path)
        assert {n: i.file.name for n, i in found.tensors.items() if i.file} == {"a": one, "b": two}
        (note,) = found.notes
        assert note.startswith(f"weights from {PICKLE_INDEX}, a pickle")
        with WeightReader() as reader:
            for name, tensor in tensors.items():
                out = torch.empty_like(tensor)
                reader.read_into(out, found.tensors[name], name=name)
                assert torch.equal(out, tensor)
        (tmp_path / two).unlink()
        with pytest.raises(CheckpointError, match=f"1 of 2 shards are missing: {two}"):
            read_checkpoint(tmp_path)


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


class TestHostile:
    @pytest.mark.parametrize("protocol", [2, 4])
    @pytest.mark.parametrize(
        ("payload", "named"),
        [
            (lambda mark: Payload(os.system, f"touch {mark}"), "posix.system"),
            (lambda mark: Payload(open, mark, "w"), "io.open"),
            (lambda mark: Payload(eval, f"open({mark!r}, 'w')"), "builtins.eval"),
            (lambda mark: nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        ],
    )
    @pytest.mark.parametrize("inside", [False, True])
    def test_code_never_runs(
        self,
        payload: Callable[[str], object],
        named: str,
        inside: bool,
        protocol: int,
        tmp_path: Path,
    ) -> None:
        mark = tmp_path / "mark"
        bad = payload(str(mark))
        torch.save({"a": draw(2), "b": bad} if inside else bad, "x.bin", pickle_protocol=protocol)
        error = refused(Path("x.bin"))
        assert not mark.exists()
        assert type(error) is CheckpointError
        spelled = {named, named.replace("builtins", "__builtin__")}  # as protocol 2 has it
        assert any(f"its pickle holds {name}, which" in error.message for name in spelled)
        assert "can run code" in error.hint

    def test_the_payload_would_run(self, tmp_path: Path) -> None:
        """So that the test above can fail."""
        mark = tmp_path / "mark"
        pickle.loads(pickle.dumps(Payload(os.system, f"touch {mark}")))
        assert mark.exists()

    @pytest.mark.parametrize(
        ("program", "said"),
        [
            (b"cos\nsystem\n(S'touch mark'\ntR.", "os.system"),
            (b"(S'touch mark'\nios\nsystem\n.", "the instruction STRING"),
            (b"\x80\x02(\x8c\x01aios\nsystem\n.", "the instruction INST"),
            (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
            (b"\x80\x04\x8c\x05torch\x8c\x04load\x93.", "torch.load"),
            (b"0.", "the instruction POP"),
            (b"\x80\x02\x82\x01.", "the instruction EXT1"),
            (b"ccollections\nOrderedDict\n)\x81.", "the instruction NEWOBJ"),
            (b"ccollections\nOrderedDict\n}b.", "a change to an object"),
            (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "a call of torch._utils._rebuild_tensor"),
            (b"ctorch\nFloatStorage\n)R.", "a call of torch.FloatStorage"),
            (b"ccollections\nOrderedDict\n(]tR.", "a call of collections.OrderedDict"),
            (b"\x80\x04\x8c\x02os\x8c\x05\xd1\x82\x1b[2\x93.", "os.\\u0442\\x1b[2, which"),
        ],
    )
    def test_programs_that_are_refused_by_name(self, program: bytes, said: str) -> None:
        error = refused(with_program(Path("x.bin"), program))
        assert f"its pickle holds {said}" in error.message
        assert not Path("mark").exists()

    @pytest.mark.parametrize(
        "program",
        [
            b"",
            b"\x80\x02",
            b".",
            b"\x80\x02h\x07.",
            b"\x80\x02j\xff\xff\xff\xff.",
            b"\x80\x02}r\xff\xff\xff\xff",
            b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f",
            b"\x80\x04\x95" + b"\xff" * 8,
            b"\x80\x02}(K\x01u.",
            b"\x80\x02})K\x01s.",
            b"\x80\x02KaK\x01K\x02s.",
            b"\x80\x02K\x01K\x02a.",
            b"\x80\x02}Q.",
            b"\x80\x02K\x01K\x02R.",
            b"\x80\x02u.",
            b"\x80\x04))\x93.",
        ],
    )
    def test_damaged_programs(self, program: bytes) -> None:
        error = refused(with_program(Path("x.bin"), program))
        assert type(error) is CheckpointError
        assert "is damaged or truncated" in error.message

    def test_a_program_that_grows_without_end(self) -> None:
        """Each tuple holds the one before ten times: printed or hashed, it would fill memory."""
        program = b"\x80\x02)q\x00"
        for _ in range(60):
            program += b"(" + b"h\x00" * 10 + b"tq\x00"
        for end in (b".", b"}q\x01h\x00h\x00s.", b"h\x00\x93.", b"Q.", b"h\x00R."):
            refused(with_program(Path("x.bin"), program + end))
        deep = b"\x80\x02)" + b"\x85" * 200_000
        for end in (b".", b"\x93.", b"}\x85Q."):
            refused(with_program(Path("x.bin"), deep + end))

    def test_a_program_too_large(self) -> None:
        program = b"\x80\x02" + b"}" * MAX_PICKLE_BYTES + b"."
        assert "data.pkl takes" in refused(with_program(Path("x.bin"), program)).message


def rebuilt(
    *, numbers: Any = 24, offset: Any = 0, shape: Any = (4, 6), strides: Any = (6, 1)
) -> bytes:
    """A program whose one tensor says these numbers."""

    class Pickler(pickle._Pickler):  # the Python one, whose ids may be tuples of anything
        def persistent_id(self, obj: object) -> object:
            return ("storage", torch.FloatStorage, "0", "cpu", numbers) if obj is STORAGE else None

    class Rebuilt:
        def __reduce__(self) -> tuple[Any, ...]:
            arguments = (STORAGE, offset, shape, strides, False, collections.OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    with open("program", "wb") as file:
        Pickler(file, 2).dump({"weight": Rebuilt()})
    return Path("program").read_bytes()


STORAGE = object()


class TestTensors:
    def write(self, **numbers: Any) -> Path:
        program = rebuilt(**numbers)
        torch.save({"weight": draw(4, 6)}, "x.bin")
        return repacked(Path("x.bin"), lambda n, d: program if n.endswith("data.pkl") else d)

    def test_the_numbers_of_a_sound_one(self) -> None:
        """So that the ones below fail for what they say."""
        found = read_pickle(self.write())["weight"]
        assert Path("x.bin").read_bytes()[found.offset :][:96] == draw(4, 6).numpy().tobytes()
        assert read_pickle(self.write(shape=(1, 24), strides=(77, 1)))["weight"].shape == (1, 24)

    @pytest.mark.parametrize(
        ("numbers", "said"),
        [
            ({"shape": (5, 6)}, "weight reaches beyond its storage"),
            ({"offset": 1}, "weight reaches beyond its storage"),
            ({"numbers": 25}, "the storage of weight is cut"),
            ({"shape": (1 << 40, 1 << 40), "strides": (1 << 40, 1)}, "beyond its storage"),
            ({"offset": -1}, "impossible shape"),
            ({"offset": True}, "impossible shape"),
            ({"offset": 0.0}, "impossible shape"),
            ({"numbers": "24"}, "impossible shape"),
            ({"numbers": 1 << 60}, "impossible shape"),
            ({"shape": (-4, -6)}, "impossible shape"),
            ({"shape": (4,)}, "impossible shape"),
            ({"shape": (1,) * 9, "strides": (1,) * 9}, "impossible shape"),
            ({"shape": [4, 6]}, "weight has no shape"),
            ({"strides": None}, "weight has no shape"),
        ],
    )
    def test_numbers_that_cannot_be(self, numbers: dict[str, Any], said: str) -> None:
        error = refused(self.write(**numbers))
        assert type(error) is CheckpointError
        assert said in error.message

    @pytest.mark.parametrize(
        "tensor", [draw(4, 6).t(), draw(8)[::2], draw(3).expand(2, 3), draw(6, 6)[:, :3]]
    )
    def test_rows_that_do_not_follow_each_other(self, tensor: Tensor) -> None:
        torch.save({"weight": tensor}, "x.bin")
        error = refused(Path("x.bin"))
        assert type(error) is UnsupportedModel
        assert "weight is not stored row by row" in error.message

    @pytest.mark.parametrize(
        ("contents", "said"),
        [
            ([draw(2)], "the whole is a list"),
            (draw(2), "the whole is a tensor"),
            (3, "the whole is a int"),
            ({"model": {"a": draw(2)}}, "model is a dict"),
            ({"state_dict": {"a": {"b": draw(2)}}}, "a is a dict"),
            ({"state_dict": {"a": draw(2)}, "optimizer": {}}, "optimizer beside state_dict is a d"),
            ({"state_dict": {"a": draw(2)}, "b": draw(2)}, "b beside state_dict is a tensor"),
            ({"a": draw(2), "shape": (2,)}, "shape is a tuple"),
        ],
    )
    def test_more_than_tensors(self, contents: object, said: str) -> None:
        torch.save(contents, "x.bin")
        error = refused(Path("x.bin"))
        assert f"x.bin is not a dict of tensors: {said}" in error.message

    @pytest.mark.parametrize(
        "tensor",
        [
            draw(2, 3).to_sparse(),
            torch.complex(draw(2), draw(2)),
            draw(2).to(torch.float8_e4m3fn),
            torch.complex(draw(2), draw(2)).conj().imag,  # negated when it is read
        ],
    )
    def test_other_kinds_of_tensors(self, tensor: Tensor) -> None:
        torch.save({"weight": tensor}, "x.bin")
        assert "its pickle holds " in refused(Path("x.bin")).message


class TestFile:
    def test_of_before_zip(self) -> None:
        torch.save({"a": draw(2)}, "x.bin", _use_new_zipfile_serialization=False)
        assert Path("x.bin").read_bytes().startswith(LEGACY)
        error = refused(Path("x.bin"))
        assert type(error) is UnsupportedModel
        assert "before 1.6" in error.message
        assert "save it as safetensors" in error.hint

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_program_of_torchscript(self) -> None:
        torch.jit.script(nn.Linear(2, 2)).save("x.bin")
        assert "is a TorchScript program" in refused(Path("x.bin")).message

    @pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    @pytest.mark.parametrize("part", ["data.pkl", "data/0"])
    def test_compressed(self, part: str, compression: int) -> None:
        torch.save({"a": torch.zeros(1000)}, "x.bin")
        with zipfile.ZipFile("x.bin") as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile("x.bin", "w") as archive:
            for name, data in entries.items():
                archive.writestr(name, data, compression if name.endswith(part) else 0)
        error = refused(Path("x.bin"))
        assert f"/{part} is compressed or encrypted" in error.message
        assert "without compression" in error.hint

    def test_repacked_without_compression(self) -> None:
        torch.save({"a": draw(3)}, "x.bin")
        found = read_pickle(repacked(Path("x.bin"), lambda name, data: data))["a"]
        assert Path("x.bin").read_bytes()[found.offset :][:12] == draw(3).numpy().tobytes()

    def test_big_endian(self) -> None:
        torch.save({"a": draw(3)}, "x.bin")
        change = lambda n, d: b"big" if n.endswith("byteorder") else d  # noqa: E731
        error = refused(repacked(Path("x.bin"), change))
        assert type(error) is UnsupportedModel
        assert "big-endian" in error.message

    def test_of_before_the_byte_order_was_written(self) -> None:
        torch.save({"a": draw(3)}, "x.bin")
        keep = ("data.pkl", "data/0", "version")
        repacked(Path("x.bin"), lambda name, data: data if name.endswith(keep) else None)
        assert list(read_pickle(Path("x.bin"))) == ["a"]

    def test_a_storage_that_is_not_there(self) -> None:
        torch.save({"a": draw(3)}, "x.bin")
        repacked(Path("x.bin"), lambda name, data: None if name.endswith("data/0") else data)
        assert "the storage of a is not in it" in refused(Path("x.bin")).message

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_two_programs(self) -> None:
        torch.save({"a": draw(3)}, "x.bin")
        with zipfile.ZipFile("x.bin", "a") as archive:
            archive.writestr(next(n for n in archive.namelist() if n.endswith("data.pkl")), b"x")
        assert "two entries have one name" in refused(Path("x.bin")).message

    @pytest.mark.parametrize("data", [b"", b"x", b"<!doctype html>" * 9, bytes(5000)])
    def test_no_such_file_at_all(self, data: bytes) -> None:
        Path("x.bin").write_bytes(data)
        assert f"({len(data)} bytes) is not a PyTorch weight file" in refused(Path("x.bin")).message

    def test_a_git_lfs_pointer(self, tmp_path: Path) -> None:
        (tmp_path / PICKLE).write_bytes(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00"
        )
        with pytest.raises(CheckpointError, match="is a Git-LFS pointer"):
            read_checkpoint(tmp_path)

    def test_cut_and_flipped_anywhere(self) -> None:
        """One clear error, or the tensors inside the file: never anything else."""
        torch.save({"a": draw(3), "b": draw(2, 2).half()}, "whole.bin")
        whole = Path("whole.bin").read_bytes()
        damaged = Path("x.bin")
        for stop in range(0, len(whole), 7):
            damaged.write_bytes(whole[:stop])
            refused(damaged)
        for at in range(0, len(whole), 3):
            for value in (0, whole[at] ^ 0x80, 0xFF):
                damaged.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
                with contextlib.suppress(VlmrunError):
                    found = read_pickle(damaged)
                    assert all(t.offset + size_of(t) <= len(whole) for t in found.values())

    def test_a_directory_that_promises_too_much(self) -> None:
        torch.save({"a": draw(3)}, "x.bin")
        raw = repacked(Path("x.bin"), lambda name, data: data).read_bytes()
        at = raw.rindex(b"PK\5\6")
        huge = struct.pack("<I", 0x7FFFFFFF)
        Path("x.bin").write_bytes(raw[: at + 12] + huge + raw[at + 16 :])
        assert "is damaged or truncated" in refused(Path("x.bin")).message
        sparse = Path("y.bin")
        sparse.write_bytes(raw[:100])
        os.truncate(sparse, 100 << 20)
        with open(sparse, "ab") as file:
            file.write(raw[at : at + 12] + struct.pack("<II", 99 << 20, 1 << 20) + raw[at + 20 :])
        assert f"it asks for {99 << 20} bytes at once" in refused(sparse).message
