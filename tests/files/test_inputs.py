import os
from io import BytesIO
from pathlib import Path

import pytest

from vlmrun.errors import ImageError, UsageError
from vlmrun.files.images import DecodeOptions, decode_image
from vlmrun.files.inputs import ImageInput, Inputs, find_inputs

ODD = os.fsdecode(b"caf\xe9.jpg")  # a name that is not UTF-8


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder the tests stand in."""
    names = ["b.jpg", "a.PNG", "notes.txt", ".hidden.jpg", "x[1].jpg", "ab.gif"]
    deep = ["album/2.webp", "album/1.jpeg", "album/deep/3.tif", "album/.git/4.jpg", "empty/x.txt"]
    for name in [*names, *deep, "outer/inner/5.jpg", ODD]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def paths(inputs: Inputs) -> list[str]:
    return [image.path for image in inputs.images]


def refused(words: str, named: list[str], hint: str = "", **options) -> UsageError:
    with pytest.raises(UsageError, match=words) as caught:
        find_inputs(named, **options)
    assert caught.value.exit_code == 2
    assert hint in caught.value.hint
    return caught.value


def test_one_file_is_single(tree):
    assert find_inputs(["b.jpg"]) == Inputs((ImageInput("b.jpg"),), single=True)


def test_order_and_repetition_are_kept(tree):
    inputs = find_inputs(["b.jpg", "a.PNG", "notes.txt", "b.jpg"])
    assert paths(inputs) == ["b.jpg", "a.PNG", "notes.txt", "b.jpg"]
    assert not inputs.single


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("album", ["album/1.jpeg", "album/2.webp"]),
        ("album/", ["album/1.jpeg", "album/2.webp"]),
        (".", ["./a.PNG", "./ab.gif", "./b.jpg", f"./{ODD}", "./x[1].jpg"]),
    ],
)
def test_folder(tree, named, expected):
    inputs = find_inputs([named])
    assert paths(inputs) == expected
    assert not inputs.single
    assert inputs.notes == ()


def test_folder_and_its_subfolders(tree):
    inputs = find_inputs(["album"], recursive=True)
    assert paths(inputs) == ["album/1.jpeg", "album/2.webp", "album/deep/3.tif"]


def test_folder_of_one_picture_is_not_single(tree):
    assert not find_inputs(["album/deep"]).single


@pytest.mark.parametrize(
    ("named", "recursive", "note"),
    [
        ("empty", False, "empty: no pictures in this folder"),
        ("empty", True, "empty: no pictures in this folder"),
        ("outer", False, "outer: pictures are in its subfolders only; -r reads them too"),
    ],
)
def test_folder_without_pictures_is_a_note(tree, named, recursive, note):
    assert find_inputs([named], recursive=recursive) == Inputs((), notes=(note,))


def test_folder_that_may_not_be_listed_becomes_an_error_row(tree):
    tree.chmod(0o755)
    os.chmod("album", 0)
    user = os.geteuid()
    if user == 0:  # root may list everything, so look at it as somebody else
        os.seteuid(65534)
    try:
        assert paths(find_inputs(["album", "b.jpg"])) == ["album", "b.jpg"]
        with pytest.raises(ImageError, match="permission denied"):
            decode_image(ImageInput("album"), options=DecodeOptions())
    finally:
        os.seteuid(user)
        os.chmod("album", 0o755)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("album/*", ["album/1.jpeg", "album/2.webp", "album/deep/3.tif"]),
        ("a*", ["a.PNG", "ab.gif", "album/1.jpeg", "album/2.webp"]),
        ("**/*.jpeg", ["album/1.jpeg"]),
        ("x[1].jpg", ["x[1].jpg"]),
        ("?.jpg", ["b.jpg"]),
        ("*.txt", ["notes.txt"]),
    ],
)
def test_pattern_the_shell_did_not_expand(tree, pattern, expected):
    inputs = find_inputs([pattern])
    assert paths(inputs) == expected
    assert inputs.single == (pattern == "x[1].jpg"), "only a name that is literally there"


def test_missing_file_among_others_stays(tree):
    assert paths(find_inputs(["gone.jpg", "b.jpg", "*.nef"])) == ["gone.jpg", "b.jpg", "*.nef"]


def test_nothing_named_exists(tree):
    error = refused("no such file: gone.jpg, \\*.nef", ["gone.jpg", "*.nef"])
    assert "more" not in error.message


def test_many_missing_files_are_counted(tree):
    names = [f"{number}.jpg" for number in range(8)]
    refused(r"no such file: 0\.jpg, 1\.jpg, 2\.jpg, 3\.jpg, 4\.jpg and 3 more$", names)


def test_name_that_cannot_be_looked_at_becomes_an_error_row(tree):
    assert paths(find_inputs(["x" * 300])) == ["x" * 300]


def test_bytes_on_standard_input(tree):
    inputs = find_inputs(["-"], stdin=BytesIO(b"picture"))
    assert inputs == Inputs((ImageInput("-", b"picture"),), single=True)


def test_bytes_on_standard_input_among_files(tree):
    inputs = find_inputs(["b.jpg", "-"], stdin=BytesIO(b"picture"))
    assert inputs.images == (ImageInput("b.jpg"), ImageInput("-", b"picture"))
    assert not inputs.single


@pytest.mark.parametrize(
    ("named", "files_from"), [(["-", "-"], None), (["-"], "-"), (["-", "b.jpg", "-"], "list")]
)
def test_standard_input_is_read_once(tree, named, files_from):
    refused("more than once", named, "`-` once", files_from=files_from, stdin=BytesIO())


@pytest.mark.parametrize(("named", "files_from"), [(["-"], None), ([], "-")])
def test_standard_input_that_is_not_there(tree, named, files_from):
    refused("standard input cannot be read here", named, "name files", files_from=files_from)


@pytest.mark.parametrize("source", ["list.txt", "-", None])
@pytest.mark.parametrize(
    ("data", "null_separated"),
    [
        (b"b.jpg\ncaf\xe9.jpg\n\nx[1].jpg", False),
        (b"\xef\xbb\xbfb.jpg\r\ncaf\xe9.jpg\r\nx[1].jpg\r\n", False),
        (b"b.jpg\0caf\xe9.jpg\0x[1].jpg\0", True),
    ],
)
def test_list_of_paths(tree, source, data, null_separated):
    (tree / "list.txt").write_bytes(data)
    inputs = find_inputs([], files_from=source, null_separated=null_separated, stdin=BytesIO(data))
    assert paths(inputs) == ["b.jpg", ODD, "x[1].jpg"]
    assert not inputs.single


def test_null_separated_names_may_hold_line_breaks(tree):
    inputs = find_inputs([], stdin=BytesIO(b"two\nlines.jpg\0\r\0"), null_separated=True)
    assert paths(inputs) == ["two\nlines.jpg", "\r"]


def test_list_comes_after_names_and_takes_names_literally(tree):
    inputs = find_inputs(["b.jpg"], files_from="-", stdin=BytesIO(b"album\n*.jpg\n-\n"))
    assert inputs.images == tuple(map(ImageInput, ["b.jpg", "album", "*.jpg", "./-"]))
    assert not inputs.single


def test_list_of_one_path_is_not_single(tree):
    assert not find_inputs([], stdin=BytesIO(b"b.jpg\n")).single


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (None, "standard input: no paths in the list"),
        ("-", "standard input: no paths in the list"),
        ("list.txt", "list.txt: no paths in the list"),
    ],
)
def test_empty_list_is_a_note(tree, source, note):
    (tree / "list.txt").write_bytes(b"\n\n")
    assert find_inputs([], files_from=source, stdin=BytesIO()) == Inputs((), notes=(note,))


def test_nothing_named_and_nothing_to_read(tree):
    assert find_inputs([]) == Inputs(())


def test_names_leave_standard_input_alone(tree):
    stdin = BytesIO(b"a.PNG\n")
    assert paths(find_inputs(["b.jpg"], stdin=stdin)) == ["b.jpg"]
    assert stdin.read() == b"a.PNG\n"


def test_list_that_does_not_exist(tree):
    refused("--files-from gone.txt: No such file", [], files_from="gone.txt")
    refused("--files-from album: Is a directory", [], files_from="album")


def test_picture_piped_in_without_naming_it(tree):
    data = BytesIO(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    refused("standard input holds NUL bytes", [], "name `-`", stdin=data)


def test_null_separated_without_a_list(tree):
    refused("-0 describes a list", ["b.jpg"], "--files-from", null_separated=True)


@pytest.mark.parametrize("url", ["http://x.org/a.jpg", "HTTPS://x.org/a.jpg"])
def test_urls_are_refused(tree, url):
    words = "URLs are not read yet"
    refused(words, ["b.jpg", url])
    refused(words, [], stdin=BytesIO(url.encode()))


def test_names_that_are_not_utf8_open_their_file(tree):
    (tree / ODD).write_bytes(b"no picture")
    [image] = find_inputs([ODD]).images
    with pytest.raises(ImageError, match="starts with b'no picture'"):
        decode_image(image, options=DecodeOptions())


@pytest.mark.parametrize("named", ["*", "?"])
def test_a_file_called_as_standard_input_is_told_from_it(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    Path("-").write_bytes(b"in a file")
    inputs = find_inputs(["-", named], stdin=BytesIO(b"on stdin"))
    assert inputs.images == (ImageInput("-", b"on stdin"), ImageInput("./-"))


def test_a_pattern_stays_out_of_linked_folders(tmp_path, monkeypatch):
    """As -r does; two links to a folder above would be 2**40 paths."""
    for name in ("in/a.png", "in/sub/b.png", "in/.hidden/c.png", "elsewhere/d.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for name in ("one", "two"):
        (tmp_path / "in/sub" / name).symlink_to(tmp_path / "in")
    (tmp_path / "in/sub/e.png").symlink_to(tmp_path / "elsewhere/d.png")
    monkeypatch.chdir(tmp_path)
    expected = ["in/a.png", "in/sub/b.png", "in/sub/e.png"]
    for pattern, start in (
        ("in/**/*.png", ""),
        ("./in/**/*.png", "./"),
        (f"{tmp_path}/i?/**/*.png", f"{tmp_path}/"),
    ):
        found = [image.path for image in find_inputs([pattern]).images]
        assert found == [start + name for name in expected]
    assert [image.path for image in find_inputs(["**/s*/**/b.png"]).images] == ["in/sub/b.png"]
    assert [image.path for image in find_inputs(["**/b.png"]).images] == ["in/sub/b.png"]
