"""The CPU kernels compiled with the address, undefined behaviour or thread sanitizer, under the kernel tests.

`python -m proofs.sanitize_cpu --help` says how to run it.
"""
