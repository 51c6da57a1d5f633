"""Correctness of attention on this machine: quick proofs (`nsa doctor --prove`) and the GPU check."""
