"""Names near one that nobody knows, for hints."""

import difflib
from collections.abc import Collection


def nearest(name: str, known: Collection[str], *, most: int = 3) -> list[str]:
    """Known names that hold it, else those spelled much like it; the nearest first."""
    low = name.lower()
    holding = [each for each in known if low and low in each.lower()]
    return (holding or difflib.get_close_matches(low, known, n=most))[:most]
