"""One job in several processes: the first one writes and talks, the others only compute."""

import os
import time
from collections.abc import Sequence

from vlmrun.errors import ProcessLost, UsageError
from vlmrun.models.sharding import read_shard

TORCHRUN = "TORCHELASTIC_RUN_ID"  # is set in the processes that it starts
PATIENCE = 5.0  # seconds; processes on one machine start at different moments


def follows_another(*, tp: bool) -> bool:
    """Whether this process is one of several and not the first.

    Raises:
        UsageError: torchrun did not start it, or started several that know nothing of it.
    """
    if tp:
        return read_shard(os.environ).rank > 0
    if TORCHRUN in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "torchrun started several processes, and each would do the whole job",
            "add --tp to share one model between them, or start one process",
        )
    return False


def let_others_tell(arguments: Sequence[str], error: Exception) -> str:
    """Wait for another process to tell of an error: the first, as most errors are those of all,
    or the one that was lost. torchrun ends the others as soon as one has ended. Returns what to
    put before an error that none has told.
    """
    rank = os.environ.get("RANK", "0")
    lost = isinstance(error, ProcessLost)
    alone = "--tp" not in arguments and TORCHRUN not in os.environ
    if alone or (rank == "0" and not lost):
        return ""
    time.sleep(2 * PATIENCE if lost else PATIENCE)
    return "" if rank == "0" else f"process {rank}: "
