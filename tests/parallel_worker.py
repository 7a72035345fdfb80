"""Started by torchrun: runs command lines, one after the other, as each of its processes.

python -m torch.distributed.run --nproc-per-node 2 parallel_worker.py LIST
LIST holds one command line per line, as JSON lists. What comes of it goes to LIST.RANK: `codes` of
the commands, `differ` of processes that read different files, `least` and `lost` of messages.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from vlmrun.cli import main
from vlmrun.errors import VlmrunError
from vlmrun.nn.parallel import check_same, joined, least_number


def refused(step: Callable[[], object]) -> str:
    try:
        step()
    except VlmrunError as error:
        return f"{type(error).__name__}: {error.message}"
    return ""


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    with joined("cpu"):  # once: torchrun's store serves one meeting
        codes = [main(json.loads(line)) for line in lines]
        check_same(["alike"])
        found: dict[str, object] = {"codes": codes, "least": least_number(7 - rank)}
        found["differ"] = refused(lambda: check_same([str(rank)]))
        if rank == 0:  # the other one has left
            found["lost"] = refused(lambda: least_number(1))
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(found), encoding="utf-8")
