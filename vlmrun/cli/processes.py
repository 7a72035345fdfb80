"""One job in several processes: the first one writes and talks, the others only compute."""

import os
from collections.abc import Sequence

from vlmrun.errors import UsageError
from vlmrun.models.sharding import read_shard


def follows_another(*, tp: bool) -> bool:
    """Whether this process is one of several and not the first.

    Raises:
        UsageError: torchrun did not start it, or started several that know nothing of it.
    """
    if tp:
        return read_shard(os.environ).rank > 0
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "torchrun started several processes, and each would do the whole job",
            "add --tp to share one model between them, or start one process",
        )
    return False


def told_by_the_first(arguments: Sequence[str]) -> bool:
    """Whether the first process reads the same command line, and tells what is wrong with it."""
    return "--tp" in arguments and os.environ.get("RANK", "0") != "0"
