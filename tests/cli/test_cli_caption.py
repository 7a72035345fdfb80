"""`vlmrun caption` with the packaged model: streams, rows, exit codes, signals."""

import errno
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Done

from vlmrun.cli import main

CAPTIONS = ("an elephant", "a strawberry", "a red apple")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def caption(vlmrun: Command) -> Command:
    def run(*argv: object, **streams: Any) -> Done:
        return vlmrun("caption", "-m", "demo", *argv, **streams)

    return run


@pytest.fixture
def heeded() -> Iterator[None]:
    """Signals as a terminal's program takes them, where the tests run under nohup or `trap ''`."""
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def broken(tmp_path: Path, three: list[Path]) -> Path:
    path = tmp_path / "broken.png"
    path.write_bytes(three[0].read_bytes()[:200])
    return path


def test_one_file_gives_the_caption_alone(caption: Command, three: list[Path]) -> None:
    assert caption(three[0]) == Done(0, b"an elephant\n", "")
    assert caption("-", stdin=three[0].read_bytes()) == Done(0, b"an elephant\n", "")


def test_several_files_give_a_line_each_in_the_order_given(
    caption: Command, three: list[Path], pictures: Path, tmp_path: Path
) -> None:
    expected = "".join(f"{p}\t{c}\n" for p, c in zip(three, CAPTIONS, strict=True)).encode()
    assert caption(*three) == Done(0, expected, "")
    listed = "\n".join(map(str, three)).encode()
    assert caption(stdin=listed) == Done(0, expected, "")
    (tmp_path / "list").write_bytes(listed.replace(b"\n", b"\0"))
    assert caption("--files-from", tmp_path / "list", "-0") == Done(0, expected, "")
    assert caption(pictures / "red-*.png").out == b"%b\ta red apple\n" % bytes(three[2])
    folder = caption(pictures)
    assert [line.split("\t")[0] for line in folder.lines] == sorted(map(str, pictures.glob("*g")))


def test_the_file_name_can_be_forced(caption: Command, three: list[Path]) -> None:
    assert caption("-H", three[0]).text == f"{three[0]}\tan elephant\n"
    assert caption("--no-filename", *three).lines == list(CAPTIONS)


def test_json_rows_say_everything(caption: Command, three: list[Path]) -> None:
    (alone,) = caption("--json", three[0]).rows
    assert isinstance(alone.pop("ms"), float)
    assert isinstance(alone.pop("tokens"), int)
    assert alone == {
        "v": 1,
        "path": str(three[0]),
        "prompt": "Describe this image.",
        "caption": "an elephant",
        "model": "demo",
        "revision": None,
        "dtype": "bfloat16",
        "finish": "stop",
        "sha256": hashlib.sha256(three[0].read_bytes()).hexdigest(),
    }
    assert [row["caption"] for row in caption("--json", *three).rows] == list(CAPTIONS)


def test_what_fails_is_a_row_and_the_others_go_on(
    caption: Command, three: list[Path], broken: Path
) -> None:
    done = caption("--json", three[0], broken, "nowhere.png", three[1])
    assert done.code == 3
    first, second, third, fourth = done.rows
    assert (first["caption"], fourth["caption"]) == CAPTIONS[:2]
    assert (second["path"], third["path"]) == (str(broken), "nowhere.png")
    assert set(second) == {"v", "path", "error"}
    assert second["error"] == {"type": "ImageError", "message": second["error"]["message"]}
    assert "truncated" in second["error"]["message"]
    assert third["error"]["message"] == "no such file"
    assert f"vlmrun: {broken}: " in done.err
    assert "vlmrun: nowhere.png: no such file\n" in done.err
    assert done.err.endswith("vlmrun: 2 done, 2 failed\n")
    assert "no such file" in caption("-q", three[0], "nowhere.png").err


def test_text_leaves_failures_to_stderr(caption: Command, three: list[Path], broken: Path) -> None:
    done = caption(broken, three[0])
    assert (done.code, done.text) == (3, f"{three[0]}\tan elephant\n")


def test_all_failed_exits_1(caption: Command, broken: Path) -> None:
    assert caption(broken).code == 1
    assert caption(broken, broken).code == 1


def test_fail_fast_stops_after_the_batch_of_a_failure(
    caption: Command, three: list[Path], broken: Path
) -> None:
    done = caption("--fail-fast", "-b", "2", "--no-filename", broken, three[0], three[1])
    assert (done.code, done.lines) == (3, ["an elephant"])
    done = caption("--fail-fast", "-b", "1", "--no-filename", three[0], broken, three[1])
    assert (done.code, done.lines) == (3, ["an elephant"])
    assert done.err.endswith("vlmrun: 1 done, 1 failed, 1 not tried\n")
    done = caption("--fail-fast", "-b", "1", "--no-filename", broken, three[0])
    assert (done.code, done.out) == (1, b"")


def test_an_output_file_leaves_stdout_empty(
    caption: Command, three: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "captions.jsonl"
    assert caption(*three, "-o", output) == Done(0, b"", "")
    written = [json.loads(line)["caption"] for line in output.read_text().splitlines()]
    assert written == list(CAPTIONS)
    assert caption(*three, "-o", output).code == 1
    assert caption(three[0], "-o", output, "--exists", "overwrite").code == 0
    assert len(output.read_text().splitlines()) == 1
    assert caption(three[0], "-o", tmp_path / "caption.txt").code == 0
    assert (tmp_path / "caption.txt").read_text() == "an elephant\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["caption.txt", "captions.jsonl"]


def test_a_table_has_the_path_of_its_one_picture(
    caption: Command, three: list[Path], tmp_path: Path
) -> None:
    assert caption(three[0], "-o", tmp_path / "x.tsv").code == 0
    assert (tmp_path / "x.tsv").read_text() == f"{three[0]}\tan elephant\n"


def test_a_background_of_three_digits(caption: Command, three: list[Path]) -> None:
    assert caption(three[0], "--background", "#fFf") == Done(0, b"an elephant\n", "")


def test_several_prompts_give_several_captions(
    caption: Command, three: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("Describe this image.\n")
    asked = ["-p", "short=Describe this image.", "-p", "what is it?"]
    done = caption(three[0], *asked, "--prompt-file", tmp_path / "prompt")
    assert done.code == 0
    assert [line.split("\t")[:2] for line in done.lines] == [
        [str(three[0]), "short"],
        [str(three[0]), "what is it?"],
        [str(three[0]), "Describe this image."],
    ]
    found = caption(three[0], *asked, "--json").rows
    assert [(row["prompt"], row.get("prompt_name")) for row in found] == [
        ("Describe this image.", "short"),
        ("what is it?", None),
    ]


def test_results_are_written_as_they_are(caption: Command, three: list[Path]) -> None:
    prefix = "[bold]long[/bold] " + "word " * 100
    done = caption(three[0], "--prefix", prefix, "--suffix", "\n[/]")
    assert done.text == f"{prefix}an elephant\n[/]\n"
    done = caption(three[0], "--suffix", "\nend", "--one-line")
    assert done.text == "an elephant end\n"
    assert caption(*three[:2], "--suffix", "\nend").lines[0].endswith("\tan elephant end")


def test_generation_flags_reach_the_model(caption: Command, three: list[Path]) -> None:
    (row,) = caption("--json", three[0], "--max-new-tokens", "1").rows
    assert (row["tokens"], row["finish"]) == (1, "length")
    assert caption(three[0], "--stop", "eleph").text.strip() == "an"
    hot = ["--temperature", "50", "--max-new-tokens", "12", three[0]]
    assert caption(*hot, "--seed", "1").out == caption(*hot, "--seed", "1").out
    assert caption(*hot, "--seed", "1").out != caption(*hot, "--seed", "2").out
    assert caption(*hot, "--top-k", "1").out == b"an elephant\n"


def test_flags_of_sampling_without_it_are_noted(caption: Command, three: list[Path]) -> None:
    """An answer to --seed 2 is the one to --seed 1; who asks for several should know."""
    flags = ["--top-p", "0.5", "--seed", "2", three[0]]
    plain = b"an elephant\n"
    note = "vlmrun: --top-p, --seed: without effect at --temperature 0\n"
    assert caption(*flags) == Done(0, plain, note)
    assert caption("-q", *flags) == Done(0, plain, "")
    assert caption("--top-k", "1", "--temperature", "1", *flags) == Done(0, plain, "")


def test_what_does_not_fit_exits_4_with_a_flag_that_does(
    caption: Command, three: list[Path]
) -> None:
    refused = caption(three[0], "--ram", "1MiB")
    assert (refused.code, refused.out) == (4, b"")
    flag = re.search(r"--ram (\d+MiB)", refused.err)
    assert flag is not None
    assert f"would do is {flag[1]}; the largest picture has " in refused.err
    assert caption(three[0], "--ram", flag[1]).text == "an elephant\n"


def test_a_model_for_the_other_command_is_named(vlmrun: Command, three: list[Path]) -> None:
    done = vlmrun("caption", "-m", "demo-siglip", three[0])
    assert done.code == 1
    assert "vlmrun embed" in done.err


def test_verbose_says_what_was_decided_and_why(caption: Command, three: list[Path]) -> None:
    done = caption(three[0], "-v", "--compute-dtype", "float32")
    assert "vlmrun: weights: bfloat16 (as stored in the checkpoint)\n" in done.err
    assert "vlmrun: arithmetic: float32 (asked for)\n" in done.err
    assert "vlmrun: device: cpu (" in done.err
    assert "vlmrun: vision attention: sdpa (PyTorch has a fused kernel for heads of " in done.err
    assert "vlmrun: decoder attention: sdpa (" in done.err
    assert "vlmrun: batch: 1 (all rows of the job)\n" in done.err
    assert done.text == "an elephant\n"
    assert caption(three[0], "-v", "-q").err == ""


def test_statistics_show_both_sides(caption: Command, three: list[Path]) -> None:
    done = caption(three[0], "--stats", "--resident", "0%")
    assert done.text == "an elephant\n"
    for words in ("predicted", "measured", "RAM peak", "anonymous", "loading", "read from disk"):
        assert words in done.err
    assert "layers on DISK in vision: vision.embeddings, vision.layers.0-5, projector" in done.err
    assert re.search(r"layers on DISK in decode: .*decoder\.layers\.0-\d", done.err)
    assert "DISK" not in caption(three[0], "--stats").err
    # The prediction is of the tokens that were made, not of those that might have been.
    most = caption(three[0], "--stats", "--max-new-tokens", "4000").err
    usual = caption(three[0], "--stats", "--max-new-tokens", "64").err
    foretold = [re.search(r"(\S+) s at assumed rates", text) for text in (most, usual)]
    assert foretold[0] is not None
    assert foretold[1] is not None
    assert float(foretold[0][1]) < 2 * float(foretold[1][1])


def test_statistics_as_json_repeat_the_plan(
    caption: Command, vlmrun: Command, three: list[Path]
) -> None:
    flags = ["--ram", "4GiB", "-b", "1", "--max-new-tokens", "16"]
    done = caption(three[0], "--stats", "--json", *flags)
    told = json.loads(done.err)
    planned = json.loads(vlmrun("mem-plan", "-m", "demo", "--json", *flags, three[0]).out)
    command = told["plan"].pop("command")
    assert command == f"vlmrun caption -m demo {' '.join(flags[:4])} {' '.join(flags[4:])} " + (
        f"--json --stats {three[0]}"
    )
    del planned["command"]
    found, expected = told["plan"].pop("attention"), planned.pop("attention")
    assert told["plan"] == planned
    for part, each in found.items():  # what was expected, and what trying it showed
        assert each["backend"] == expected[part]["backend"]
        assert "fused kernel for heads of 48" in each["reason"]
    measured = told["measured"]
    kinds = [measured[f"peak_{kind}_bytes"] for kind in ("anon", "file", "shmem")]
    assert measured["peak_ram_bytes"] == sum(kinds)
    assert measured["tokens"] == done.rows[0]["tokens"]
    assert measured["tokens_per_s"] == pytest.approx(measured["tokens"] / measured["run_seconds"])


def test_a_bar_is_drawn_only_beside_results_on_a_terminal(
    caption: Command, three: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    bar = caption(*three, "-b", "1", terminals="stderr")
    assert "3/3" in bar.err
    assert "ETA" in bar.err
    assert "loading demo" in bar.err
    assert bar.out == caption(*three).out
    for flags, terminals in (
        (["-q"], "stderr"),
        (["--no-progress"], "stderr"),
        ([], "stdout stderr"),
        ([], ""),
    ):
        assert "ETA" not in caption(three[0], *flags, terminals=terminals).err
    output = tmp_path / "rows.jsonl"
    assert "3/3" in caption(*three, "-o", output, terminals="stdout stderr").err


def test_failures_show_beside_the_bar(
    caption: Command, three: list[Path], broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    done = caption(three[0], broken, "-b", "1", terminals="stderr")
    assert f"vlmrun: {broken}: " in done.err.replace("\r", "\n")
    assert done.code == 3


def test_a_terminal_that_is_gone_does_not_end_a_run(
    three: list[Path], broken: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither the bar, nor the failure shown beside it, nor the statistics."""

    class Gone(TextIOWrapper):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    reader, writer = os.pipe()
    os.close(reader)
    for broken_stream in (Gone(BytesIO()), os.fdopen(writer, "w")):
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        with monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setattr(sys, "stderr", broken_stream)
            argv = ["caption", "-m", "demo", "-b", "1", "--stats", "-o", str(output)]
            assert main([*argv, str(three[0]), str(broken), str(three[1])]) == 3
        assert len(output.read_text().splitlines()) == 3
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    broken_stream.close()


def test_a_name_that_is_empty(caption: Command, three: list[Path]) -> None:
    assert caption("", three[0], "-q").err.splitlines()[0] == "vlmrun: '': no such file"


def test_a_file_called_as_standard_input_is_itself(
    caption: Command, three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-").write_bytes(three[1].read_bytes())
    Path("list").write_text("-\n")
    done = caption("-", "--files-from", "list", stdin=three[2].read_bytes())
    assert done.lines == ["-\ta red apple", "./-\ta strawberry"]


def test_an_output_that_is_lost_is_an_error(
    caption: Command, three: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"

    def lose(name: str) -> None:
        if name == "stderr" and output.exists():
            output.unlink()

    done = caption(three[0], "no such file", three[1], "-b", "1", "-o", output, watch=lose)
    assert done.code == 1
    assert f"error: {output} was deleted while it was being written" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_ends_a_run_quietly(
    three: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = TextIOWrapper(os.fdopen(writer, "wb"))
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["caption", "-m", "demo", *map(str, three)]) == 0
    assert capsys.readouterr().err == ""
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what is buffered must go somewhere
    stream.close()


def sender(signum: int, *, to: str, times: int) -> Callable[[str], None]:
    """Send this process a signal whenever something is written on a stream, so many times."""
    sent = []

    def watch(name: str) -> None:
        if name == to and len(sent) < times:
            sent.append(name)
            os.kill(os.getpid(), signum)

    return watch


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_lets_the_batch_in_flight_end(
    caption: Command, three: list[Path], signum: int
) -> None:
    before = signal.getsignal(signum)
    done = caption(*three, "-b", "2", "-q", watch=sender(signum, to="stdout", times=1))
    assert done.code == 128 + signum
    assert [line.split("\t")[1] for line in done.lines] == list(CAPTIONS[:2])
    assert done.err == "vlmrun: 2 done, 0 failed, 1 not tried\n"
    assert signal.getsignal(signum) is before


@pytest.mark.usefixtures("heeded")
def test_a_second_signal_stops_at_once(caption: Command, three: list[Path]) -> None:
    watch = sender(signal.SIGTERM, to="stdout", times=2)
    done = caption(*three, "-b", "3", "-q", watch=watch)
    assert done.code == 143
    assert len(done.lines) == 2
    assert done.err == "vlmrun: interrupted\n"


@pytest.mark.usefixtures("heeded")
def test_a_signal_while_loading_stops_at_once(caption: Command, three: list[Path]) -> None:
    done = caption(*three, terminals="stderr", watch=sender(signal.SIGINT, to="stderr", times=1))
    assert (done.code, done.out) == (130, b"")
    assert done.err == "vlmrun: loading demo\nvlmrun: interrupted\n"


def test_a_signal_that_is_ignored_stays_so(caption: Command, three: list[Path]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        watch = sender(signal.SIGHUP, to="stdout", times=1)
        assert caption(*three, "-b", "1", watch=watch).code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded")
def test_an_interrupted_output_keeps_its_rows(
    caption: Command, three: list[Path], broken: Path, tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    argv = [three[0], broken, three[1], "-b", "1", "-o", output]
    done = caption(*argv, watch=sender(signal.SIGINT, to="stderr", times=1))
    assert done.code == 130
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["path"] for row in kept][:2] == [str(three[0]), str(broken)]
    assert not (tmp_path / "rows.jsonl.lock").exists()
