"""`python -m vlmrun`."""

from vlmrun.cli import run_and_exit

run_and_exit()
