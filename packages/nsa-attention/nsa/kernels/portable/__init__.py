"""Portable backend: exact attention on any device in chunks of queries, without compiled code.

Never allocates an S×S or S×S/d tensor. On a CPU the keys that a chunk reads follow from its values; elsewhere shapes
are static, the host reads no value, and every sum has one writer and a fixed order (`chunk.READABLE_DEVICES`).

Plain matrix products instead of `scaled_dot_product_attention`: it returns no log-sum-exp, has no kernel for
d_k ≠ d_v, and its causal flag is aligned to the wrong corner for unequal lengths. Scores are kept in fp32 whatever the
inputs are; only inputs and outputs are rounded. Backward recomputes each chunk from the saved log-sum-exp.
"""

from nsa.kernels.portable.attention import attend_backward, attend_forward
from nsa.kernels.portable.selection import select

__all__ = ["attend_backward", "attend_forward", "select"]
