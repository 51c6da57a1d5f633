"""Native Sparse Attention: a library, a trainer and the tools around them.

Importing `nsa` is free: no torch, no configuration, no environment.
"""

__version__ = "0.1.0"
