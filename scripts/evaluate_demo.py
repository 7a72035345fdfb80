#!/usr/bin/env python3
"""Measures what the packaged models `demo` and `demo-siglip` see, through the vlmrun command.

    evaluate_demo.py FOLDER

Fetches two sets of emoji into FOLDER (with `npm pack`; once), draws scenes of them there, lets
`vlmrun caption` and `vlmrun embed` read these, and prints a table. Scenes are the same at every
run. A caption counts if it is the expected one to the letter. FOLDER/wrong.tsv lists the others.

Drawing needs the package resvg-py, which nothing else here does: `.venv/bin/pip install resvg-py`.
The drawings of OpenMoji (CC-BY-SA-4.0), in no model's training, stay in FOLDER.
"""

import argparse
import io
import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAMES = """
bear, cat face, crab, dog face, duck, elephant, pine tree=evergreen-tree, fox, frog, honeybee,
ladybug=lady-beetle, lion, monkey face, mushroom, panda, penguin, pig face, rose, dinosaur=sauropod,
spider, sunflower, tulip, turtle, cherry blossom, avocado, banana, beer mug, doughnut, eggplant,
green apple, hamburger, hot dog, lemon, orange=tangerine, pineapple, pizza, red apple, strawberry,
tomato, wine glass, ice cream cone=soft-ice-cream, airplane, alarm clock, ambulance, car=automobile,
bicycle, fire engine, hourglass=hourglass-done, house, police car, rainbow, rocket, sailboat,
snowflake, stop sign, tractor, umbrella, traffic light=vertical-traffic-light, volcano,
flying saucer, flame=fire, bell, bomb, candle, crown, door, dress, gem stone, guitar, ladder,
mobile phone, pencil, telephone, top hat, basketball, bullseye, christmas tree,
pumpkin=jack-o-lantern, trophy, gift=wrapped-gift
"""  # =: how the emoji sets call it where they differ
NOTO, OPENMOJI = "@iconify-json/noto@1.2.9", "@iconify-json/openmoji@1.2.29"
SHARES = {1: (0.5, 0.75), 2: (0.3, 0.45), 3: (0.22, 0.3)}  # an object's long side of the short side
BACKGROUNDS = ("#ffffff", "#fff2d6", "#e5dff5", "#dcf0e1", "#d6eaf8", "#eeeeee")
SEED = "evaluate_demo 1"

Svg = Callable[..., bytes]
Pair = tuple[int, int]  # across, down
Row = tuple[str, int, int]  # what, scenes, right


@dataclass(frozen=True, slots=True)
class Kind:
    title: str
    scenes: int
    objects: int
    canvas: Pair = (192, 192)
    icons: str = NOTO


KINDS = (
    Kind("one object", 160, 1),
    Kind("two objects", 160, 2),
    Kind("three objects", 40, 3),
    Kind("two objects, 4:3", 60, 2, (256, 192)),
    Kind("two objects, 2:1", 60, 2, (384, 192)),
    Kind("two objects, 3:4", 60, 2, (192, 256)),
    Kind("one object, by an artist not in training", 80, 1, icons=OPENMOJI),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture, its caption, and the caption with the objects swapped."""

    kind: Kind
    file: Path
    caption: str
    swapped: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where emoji, scenes and vectors are kept")
    folder: Path = parser.parse_args().folder
    svg = find_renderer()
    folder.mkdir(parents=True, exist_ok=True)
    icons = {pack: fetch(pack, folder) for pack in (NOTO, OPENMOJI)}
    scenes = [scene for kind in KINDS for scene in draw_kind(kind, icons[kind.icons], svg, folder)]
    said = caption(scenes, folder)
    wrong = [scene for scene in scenes if said[scene.file] != scene.caption]
    missed = Counter(scene.kind for scene in wrong)
    rows = [(f"caption: {k.title}", k.scenes, k.scenes - missed[k]) for k in KINDS]
    one, two = ([scene for scene in scenes if scene.kind is kind] for kind in KINDS[:2])
    rows += measure_vectors(one, two, folder)
    print(f"{'kind':<50} {'scenes':>6} {'right':>6} {'%':>6}")
    for title, asked, right in rows:
        print(f"{title:<50} {asked:>6} {right:>6} {100 * right / asked:>6.1f}")
    fields = [(s.kind.title, str(s.file), s.caption, said[s.file]) for s in wrong]
    write_lines(folder / "wrong.tsv", ["\t".join(row) for row in fields])


def find_renderer() -> Svg:
    try:
        import resvg_py  # late, for an error of one line
    except ImportError:
        sys.exit("evaluate_demo.py draws with resvg-py: .venv/bin/pip install resvg-py")
    svg: Svg = resvg_py.svg_to_bytes
    return svg


def fetch(pack: str, folder: Path) -> dict[str, Any]:
    """An emoji set as iconify publishes it: its drawings under "icons", and their box."""
    scope, name, version = pack.removeprefix("@").replace("@", "/").split("/")
    file = folder / f"{scope}-{name}-{version}.tgz"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), pack]
    if not file.exists():
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"cannot fetch {pack} with npm: {error}")
    with tarfile.open(file) as archive:
        icons = archive.extractfile("package/icons.json")
        assert icons is not None
        return dict(json.load(icons))


def draw_kind(kind: Kind, icons: dict[str, Any], svg: Svg, folder: Path) -> list[Scene]:
    """Every name comes up equally often, as far as the number of scenes allows."""
    chance = random.Random(f"{SEED} {kind.title}")
    below = folder / "scenes" / kind.title.replace(" ", "-").replace(",", "").replace(":", "x")
    below.mkdir(parents=True, exist_ok=True)
    keys = icon_keys()
    deck: list[str] = []
    scenes = []
    for number in range(kind.scenes):
        if len(deck) < kind.objects:
            deck = list(keys)
            chance.shuffle(deck)
        chosen, deck = deck[: kind.objects], deck[kind.objects :]
        axis = number % 2 if kind.objects == 2 else 0  # two: left of and above in turn
        file = below / f"{number:03}.png"
        draw(kind, [render(keys[name], icons, svg) for name in chosen], axis, chance).save(file)
        scenes.append(Scene(kind, file, describe(chosen, axis), describe(chosen[::-1], axis)))
    return scenes


def icon_keys() -> dict[str, str]:
    pairs = (entry.partition("=") for entry in " ".join(NAMES.split()).split(", "))
    return {name: key or name.replace(" ", "-") for name, _, key in pairs}


def render(key: str, icons: dict[str, Any], svg: Svg) -> Image.Image:
    """One drawing, cropped to what is drawn, 256 pixels to its box."""
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    box = f'viewBox="0 0 {icons["width"]} {icons["height"]}"'
    text = f"<svg {spaces} {box}>{icons['icons'][key]['body']}</svg>"
    image = Image.open(io.BytesIO(svg(text, width=256)))
    return image.convert("RGBA").crop(image.getchannel("A").getbbox())


def draw(kind: Kind, icons: Sequence[Image.Image], axis: int, chance: random.Random) -> Image.Image:
    """Lay the icons out along `axis` (0: to the right, 1: down) on a plain background."""
    objects = []
    for icon in icons:
        long_side = chance.uniform(*SHARES[kind.objects]) * min(kind.canvas)
        width, height = (max(1, round(side * long_side / max(icon.size))) for side in icon.size)
        objects.append(icon.resize((width, height), Image.Resampling.LANCZOS))
    picture = Image.new("RGB", kind.canvas, chance.choice(BACKGROUNDS))
    corners = place([image.size for image in objects], kind.canvas, axis, chance)
    for image, corner in zip(objects, corners, strict=True):
        picture.paste(image, corner, image)
    return picture


def place(sizes: Sequence[Pair], canvas: Pair, axis: int, chance: random.Random) -> list[Pair]:
    """Corners, drawn until all boxes follow each other along `axis` and none is on a diagonal."""
    while True:
        room = [(canvas[0] - wide, canvas[1] - high) for wide, high in sizes]
        corners = [(chance.randint(0, across), chance.randint(0, down)) for across, down in room]
        if all(follows(a, b, axis) for a, b in pairwise(zip(corners, sizes, strict=True))):
            return corners


def follows(a: tuple[Pair, Pair], b: tuple[Pair, Pair], axis: int) -> bool:
    (corner, size), (next_corner, next_size) = a, b
    away = [abs(2 * (next_corner[i] - corner[i]) + next_size[i] - size[i]) for i in (0, 1)]
    apart = corner[axis] + size[axis] <= next_corner[axis]
    return apart and away[axis] > 1.4 * away[1 - axis]  # nearer to a diagonal, no word is right


def describe(chosen: Sequence[str], axis: int) -> str:
    articles = ["an" if name[0] in "aeiou" or name == "hourglass" else "a" for name in chosen]
    *before, last = [f"{article} {name}" for article, name in zip(articles, chosen, strict=True)]
    word = [" above " if axis else " to the left of ", " and "][len(before) > 1]
    return f"{', '.join(before)}{word}{last}" if before else last


def caption(scenes: Sequence[Scene], folder: Path) -> dict[Path, str]:
    paths = write_lines(folder / "scenes.txt", [str(scene.file) for scene in scenes])
    rows = vlmrun("caption", "-m", "demo", "--files-from", paths, "--json")
    return {Path(row["path"]): row["caption"] for row in map(json.loads, rows.splitlines())}


def measure_vectors(one: Sequence[Scene], two: Sequence[Scene], folder: Path) -> list[Row]:
    """Retrieval among 80 pictures and 80 names, and right against swapped order."""
    single = sorted({scene.caption for scene in one})
    orders = [text for scene in two for text in (scene.caption, scene.swapped)]
    paths = write_lines(folder / "scenes.txt", [str(scene.file) for scene in (*one, *two)])
    texts = write_lines(folder / "texts.txt", single + orders)
    output = str(folder / "vectors.npy")
    given = ["--files-from", paths, "--texts-from", texts, "-o", output, "--exists", "overwrite"]
    vlmrun("embed", "-m", "demo-siglip", *given)
    counts = np.cumsum([len(one), len(two), len(single)])  # rows: pictures, then texts
    pictures, couples, named, ordered = np.split(np.load(output), counts)
    to_name = to_picture = 0
    for start in range(0, len(one), len(single)):  # draw_kind deals every name once per round
        shown = slice(start, start + len(single))
        right = np.array([single.index(scene.caption) for scene in one[shown]])
        cosines = pictures[shown] @ named.T
        to_name += int((cosines.argmax(1) == right).sum())
        to_picture += int((right[cosines.argmax(0)] == np.arange(len(single))).sum())
    right_way, swapped = np.einsum("nd,nkd->kn", couples, ordered.reshape(len(two), 2, -1))
    in_order = int((right_way > swapped).sum())
    return [
        ("embed: nearest of 80 names to a picture", len(one), to_name),
        ("embed: nearest of 80 pictures to a name", len(one), to_picture),
        ("embed: right order over swapped, two objects", len(two), in_order),
    ]


def write_lines(file: Path, lines: Sequence[str]) -> str:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(file)


def vlmrun(*arguments: str) -> str:
    """What the installed command prints; its errors go to this script's stderr."""
    command = [str(Path(sys.executable).with_name("vlmrun")), *arguments, "--quiet"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    if done.returncode:
        sys.exit(f"vlmrun {arguments[0]} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
