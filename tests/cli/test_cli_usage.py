"""What every command shares: help, bad usage, streams that are closed, errors in two lines."""

import importlib
import os
import sys
from io import TextIOWrapper
from pathlib import Path

import pytest
from commands import Command, Done, assert_refused

import vlmrun as package
from vlmrun.cli import main, program

COMMANDS = ("caption", "embed", "mem-plan")
PICTURE = Path(package.__file__).parent / "data/pictures/elephant.png"
NOT_BUILT = [
    "--limit",
    "--shard",
    "-n",
    "--dry-run",
    "--max-errors",
    "--sidecar",
    "--schema",
    "--resume",
]


def test_help_names_the_commands(vlmrun: Command) -> None:
    done = vlmrun("--help")
    assert done.code == 0
    assert all(name in done.text for name in (*COMMANDS, "models", "doctor"))
    assert not any(name in done.text for name in ("serve", "similar"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_groups_its_flags(vlmrun: Command, command: str) -> None:
    done = vlmrun(command, "-h")
    assert (done.code, done.err) == (0, "")
    assert all(f"─ {panel} ─" in done.text for panel in ("Input", "Model", "Memory", "Output"))
    assert "--ram" in done.text


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_uses_the_words_of_a_shell(vlmrun: Command, command: str) -> None:
    text = " ".join(vlmrun(*command.split(), "--help").text.replace("│", " ").split())
    assert [word for word in ("<bool>", "<str>", "<list", "image") if word in text] == []
    default = {
        "": "",
        "caption": "$VLMRUN_MODEL, else llava-onevision-0.5b",
        "mem-plan": "$VLMRUN_MODEL, else llava-onevision-0.5b",
        "embed": "$VLMRUN_EMBED_MODEL, else siglip",
    }
    assert default[command] in text
    assert ("stdin" in text) == (command in ("caption", "embed"))
    assert "VLMRUN_EMBED_MODEL" not in text or command == "embed"


def test_without_arguments_help_goes_to_stderr(vlmrun: Command) -> None:
    done = vlmrun()
    assert (done.code, done.out) == (2, b"")
    assert "Usage: vlmrun" in done.err


def test_version(vlmrun: Command) -> None:
    assert vlmrun("--version").text == f"vlmrun {package.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", NOT_BUILT)
def test_flags_that_are_not_built_are_not_accepted(
    vlmrun: Command, command: str, flag: str
) -> None:
    done = vlmrun(command, flag, "1")
    assert done.code == 2
    assert f"No such option: {flag}" in done.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["fly"], "No such command 'fly'"),
        (["serve"], "No such command"),
        (["caption", "--max-new-tokens", "0"], "--max-new-tokens 0: not 1 or more"),
        (["caption", "--max-new-tokens", "x"], "--max-new-tokens x: not a whole number"),
        (["caption", "--temperature", "x"], "--temperature x: not a number"),
        (["caption", "--temperature", "-1"], "--temperature -1: not 0 or more"),
        (["caption", "--temperature", "nan"], "--temperature"),
        (["caption", "--temperature", "inf"], "--temperature inf"),
        (["caption", "--temperature", "1e-320"], "--temperature 9.99989e-321"),
        (["caption", "--seed", str(2**64)], f"--seed {2**64}: not {2**63 - 1} or less"),
        (["caption", "--seed", "9" * 5000], "--seed 9999"),
        (["caption", "--top-p", "0"], "--top-p 0: not in (0, 1]"),
        (["caption", "--top-p", "1.5"], "--top-p 1.5: not in (0, 1]"),
        (["caption", "--top-k", "-1"], "--top-k"),
        (["caption", "--seed", "-1"], "--seed"),
        (["caption", "--stop", ""], "--stop is empty"),
        (["caption", "--detail", "medium"], "--detail: 'medium' is not one of 'high', 'low'"),
        (["caption", "--frame", "-1"], "--frame"),
        (["caption", "--max-pixels", "0"], "--max-pixels"),
        (["caption", "--background", "nocolour"], "unknown colour 'nocolour'"),
        (["caption", "-p", "a=1", "-p", "a=2"], "two prompts are named 'a'"),
        (["caption", "-p", "caf\udce9"], "--prompt is not valid UTF-8"),
        (["caption", "--system", "caf\udce9"], "--system is not valid UTF-8"),
        (["caption", "--prompt-file", "/nowhere/prompt"], "--prompt-file /nowhere/prompt: No such"),
        (["caption", "-b", "0"], "--batch-size 0"),
        (["caption", "-b", "9" * 5000], "--batch-size 9999"),
        (["caption", "--device", "cuda:" + "9" * 5000], "unknown device 'cuda:9999"),
        (["embed", "--output-kind", "hidden:-" + "9" * 5000], "unknown output kind 'hidden:-9999"),
        (["caption", "-b", "two"], "--batch-size two"),
        (["caption", "--compute-dtype", "half"], "--compute-dtype: unknown dtype 'half'"),
        (["caption", "--device", "tpu"], "unknown device 'tpu'"),
        (["caption", "--ram", "much"], "--ram: 'much' is not a size"),
        (["caption", "--vram", "8XB"], "--vram: '8XB' is not a size"),
        (["caption", "--resident", "150%"], "--resident: '150%' is more than everything"),
        (["caption", "--background", "#12"], "unknown colour '#12'"),
        (["caption", "--temp", "1"], "No such option: --temp (Possible options: --temperature)"),
        (["caption", "--promt", "x"], "--prompt"),
        (["caption", "--exists", "skip"], "'skip' is not one of"),
        (["caption", "--format", "npy"], "unknown format 'npy'"),
        (["caption", "--json", "--format", "text"], "contradict each other"),
        (["caption", "--json", "-o", "x.txt"], "--json is about standard output"),
        (["caption", "-o", "x.gif"], "unknown suffix '.gif'"),
        (["caption", "-0"], "-0 describes a list"),
        (["embed", "--output-kind", "mean"], "unknown output kind 'mean'"),
        (["embed", "--format", "npy"], "npy is not written to standard output"),
        (["embed", "-o", "x.parquet"], "parquet"),
        (["embed", "--texts-from", "/nowhere/texts"], "--texts-from /nowhere/texts: No such"),
        (["embed", "-t", " "], "--text is empty"),
        (["embed", "-t", "caf\udce9"], "--text is not valid UTF-8"),
        (["embed", "-", "--texts-from", "-"], "standard input is asked for more than once"),
        (["embed", "--files-from", "-", "--texts-from", "-"], "more than once"),
        (["embed", "--prompt", "x"], "No such option: --prompt"),
        (["caption", "http://host/x.jpg"], "URLs are not read yet"),
    ],
)
def test_bad_usage_exits_2_before_any_model(
    vlmrun: Command, argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *flags = argv
    model = ["-m", "./no-such-model"] if command in ("caption", "embed") else []
    named = [] if {"-", "http://host/x.jpg", "--files-from"} & set(flags) else [PICTURE]
    done = vlmrun(command, *flags, *model, *named)
    assert_refused(done, words, hint="commands" if command not in COMMANDS else "", code=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["caption", "embed"])
def test_missing_files_exit_2(vlmrun: Command, command: str) -> None:
    done = vlmrun(command, "-m", "./no-such-model", "nowhere.png")
    assert done.code == 2
    assert "no such file: nowhere.png" in done.err


@pytest.mark.parametrize("command", ["caption", "embed"])
def test_no_input_at_a_terminal_exits_2(vlmrun: Command, command: str) -> None:
    done = vlmrun(command, terminals="stdin")
    assert done.code == 2
    assert "no INPUT" in done.err


@pytest.mark.parametrize("command", ["caption", "embed"])
@pytest.mark.parametrize("flags", [[], ["--files-from", "-"]])
def test_an_empty_list_is_done_with_a_note(
    vlmrun: Command, command: str, flags: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    done = vlmrun(command, "-m", "./no-such-model", *flags, "-o", output)
    assert (done.code, done.out) == (0, b"")
    assert done.err == "vlmrun: standard input: no paths in the list\n"
    assert not output.exists()
    assert vlmrun(command, "-q", *flags).err == ""


@pytest.mark.parametrize("command", ["caption", "embed"])
def test_an_output_that_exists_is_found_before_the_model(
    vlmrun: Command, command: str, tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    output.write_text("precious\n")
    done = vlmrun(command, "-m", "./no-such-model", PICTURE, "-o", output)
    assert done.code == 1
    assert "exists already" in done.err
    assert "--exists overwrite" in done.err
    assert output.read_text() == "precious\n"
    done = vlmrun(command, "-m", "./no-such-model", PICTURE, "-o", output, "--exists", "overwrite")
    assert "no such folder: ./no-such-model" in done.err
    assert output.read_text() == "precious\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_known_errors_are_two_lines(vlmrun: Command, command: str) -> None:
    named = [] if command == "mem-plan" else [PICTURE]
    done = vlmrun(command, "-m", "nothing-of-that-name", *named)
    first, second = done.err.splitlines()
    assert done.code == 1
    assert first == "vlmrun: error: unknown model 'nothing-of-that-name'"
    assert second.startswith("vlmrun: hint: ")
    assert "demo" in second
    assert "Traceback" in vlmrun(command, "-vv", "-m", "nothing-of-that-name", *named).err


@pytest.mark.parametrize("command", ["caption", "embed"])
def test_a_model_that_is_nowhere_says_how_to_get_one(vlmrun: Command, command: str) -> None:
    done = vlmrun(command, PICTURE, "--offline")
    repository = {
        "caption": "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
        "embed": "google/siglip-so400m-patch14-384",
    }[command]
    assert done.code == 1
    assert f"{repository} is not in the hub cache" in done.err
    assert f"hf download {repository}" in done.err
    assert "--model demo" in done.err


def test_a_hub_that_cannot_be_reached_says_so(vlmrun: Command) -> None:
    done = vlmrun("caption", PICTURE)
    assert done.code == 1
    assert "cannot reach http://127.0.0.1:9" in done.err
    assert "--model demo" in done.err


def test_texts_that_are_none_are_done_with_a_note(vlmrun: Command) -> None:
    done = vlmrun("embed", "--texts-from", "-", stdin=b"\n \n")
    assert (done.code, done.out, done.err) == (0, b"", "vlmrun: nothing to do\n")


def test_shells_can_ask_for_completions(vlmrun: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_VLMRUN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "vlmrun cap")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert vlmrun().text.strip() == "caption"


@pytest.mark.parametrize(
    ("command", "variable"), [("caption", "VLMRUN_MODEL"), ("embed", "VLMRUN_EMBED_MODEL")]
)
def test_flag_beats_environment_beats_default(
    vlmrun: Command, command: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "from-environment")
    assert "'from-environment'" in vlmrun(command, PICTURE).err
    assert "'from-flag'" in vlmrun(command, PICTURE, "-m", "from-flag").err
    monkeypatch.setenv(variable, "")
    assert "hub cache" in vlmrun(command, PICTURE, "--offline").err


@pytest.mark.parametrize(("variable", "value"), [("VLMRUN_DTYPE", "int4"), ("VLMRUN_RAM", "lots")])
def test_variables_are_checked_as_flags_are(
    vlmrun: Command, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    done = vlmrun("caption", PICTURE, "-m", "demo")
    assert_refused(done, f"{variable}: ", value, code=2)
    flag = f"--{variable.removeprefix('VLMRUN_').lower()}"
    assert_refused(vlmrun("caption", PICTURE, "-m", "demo", flag, "no"), f"{flag}: ", code=2)


def test_a_closed_standard_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    for argv in ["caption", "-m", "./no-such-model", str(PICTURE)], ["mem-plan", "-m", "demo"]:
        done = Done(main(argv), b"", capsys.readouterr().err)
        assert_refused(done, "standard output is closed")


@pytest.mark.parametrize("buffering", [-1, 0])
@pytest.mark.parametrize("argv", ["--version", "--help", "models", "mem-plan -m demo --json"])
def test_a_full_disk_behind_standard_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: str, buffering: int
) -> None:
    binary = open("/dev/full", "wb", buffering=buffering)  # noqa: SIM115
    stream = TextIOWrapper(binary, encoding="utf-8", write_through=not buffering)
    monkeypatch.setattr(sys, "stdout", stream)
    done = Done(main(argv.split()), b"", capsys.readouterr().err)
    assert_refused(done, "standard output cannot be written: No space left on device")
    os.dup2(os.open(os.devnull, os.O_WRONLY), binary.fileno())  # what is buffered must go
    stream.close()


def test_a_library_that_does_not_take_its_settings_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As huggingface_hub for HF_HUB_DOWNLOAD_TIMEOUT=abc, and torch for PYTORCH_JIT=x."""
    (tmp_path / "a_library.py").write_text("import another_library\n")
    (tmp_path / "another_library.py").write_text("int('abc')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(program, "flush_results", lambda: importlib.import_module("a_library"))
    done = Done(main(["--version"]), b"", capsys.readouterr().err)
    assert_refused(done, "another_library cannot be imported: ValueError", hint="the environment")


def test_a_working_directory_that_is_gone_is_bad_usage(
    vlmrun: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = vlmrun("embed", PICTURE, "-m", "demo-siglip", "-o", tmp_path / "x.npy")
    assert_refused(done, "the working directory cannot be found", hint="cd to", code=2)
    assert list(tmp_path.iterdir()) == []


def test_names_of_files_neither_break_a_line_nor_drive_the_terminal(
    vlmrun: Command, tmp_path: Path
) -> None:
    (tmp_path / "a\n\x1b[31m\x9b.png").write_bytes(b"no picture")
    (tmp_path / "b.png").write_bytes(PICTURE.read_bytes())
    done = vlmrun("mem-plan", "-m", "demo", tmp_path)
    (line,) = done.err.splitlines()
    assert line.startswith(f"vlmrun: {tmp_path}/a\\n\\x1b[31m\\x9b.png: ")


def test_a_closed_standard_error_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["caption", "-m", "nothing-of-that-name", str(PICTURE)]) == 1


def test_a_closed_pipe_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = TextIOWrapper(os.fdopen(writer, "wb"))
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["mem-plan", "-m", "demo", "--json"]) == 0
    assert capsys.readouterr().err == ""
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what is buffered must go somewhere
    stream.close()


class Broken:
    """A standard input that raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.buffer = self

    def isatty(self) -> bool:
        return False

    def read(self) -> bytes:
        raise self._error


def test_unknown_errors_are_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Broken(LookupError("what is this")))
    assert main(["caption"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "vlmrun: error: internal: LookupError: what is this"
    assert "-vv" in second
    assert main(["caption", "-vv"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interruption_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Broken(KeyboardInterrupt()))
    assert main(["caption"]) == 130
    assert capsys.readouterr().err == "vlmrun: interrupted\n"
