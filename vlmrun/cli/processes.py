"""One job in several processes: the first one writes and talks, the others only compute."""

import os
import time
from collections.abc import Sequence

from vlmrun.errors import UsageError
from vlmrun.models.sharding import read_shard

PATIENCE = 5.0  # seconds; processes on one machine start at different moments


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


def let_the_first_tell(arguments: Sequence[str]) -> str:
    """Wait for the first process to tell of an error, where this is another: most errors are
    those of all, and torchrun ends the others as soon as one has ended. Returns what to put
    before one that is this process's own.
    """
    rank = os.environ.get("RANK", "0")
    if "--tp" not in arguments or rank == "0":
        return ""
    time.sleep(PATIENCE)
    return f"process {rank}: "
