"""Run SigLIP and LLaVA from a shell, in the memory you have."""

__version__ = "0.1.0"
