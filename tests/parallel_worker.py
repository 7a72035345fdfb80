"""Started by torchrun: runs command lines, one after the other, as each of its processes.

python -m torch.distributed.run --nproc-per-node 2 parallel_worker.py LIST
LIST holds one command line per line, as JSON lists; the exit codes go to LIST.RANK, and after
them that of processes which read different files.
"""

import json
import os
import sys
from pathlib import Path

from vlmrun.cli import main
from vlmrun.errors import ImageError
from vlmrun.nn.parallel import check_same, joined

if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    with joined("cpu"):  # once: torchrun's store serves one meeting
        codes = [main(json.loads(line)) for line in lines]
        check_same(["alike"])
        try:
            check_same([os.environ["RANK"]])
        except ImageError as error:
            codes.append(error.exit_code)
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(codes), encoding="utf-8")
