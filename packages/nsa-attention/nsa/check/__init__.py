"""Correctness checks on this machine: `nsa doctor --prove` (seconds) and `nsa gpu-check`."""
