"""`python -m vlmrun`."""

import sys

import vlmrun

if getattr(vlmrun, "__file__", None) is None:
    sys.exit(
        "vlmrun: error: a folder named vlmrun in the working directory hides the package\n"
        "vlmrun: hint: start the command vlmrun, or python -m vlmrun from another folder"
    )

from vlmrun.cli import run_and_exit

run_and_exit()
