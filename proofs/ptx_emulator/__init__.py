"""SIMT emulator of the PTX that Triton emits: runs compiled GPU kernels on the CPU and reports races and bad accesses.

Written from the PTX ISA manual. `python -m proofs.ptx_emulator --help` lists the commands; docs/kernels/EMULATOR.md
says what a clean run shows and what it cannot show.
"""
