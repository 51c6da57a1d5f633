"""The backends that tests can run on this machine: all that compute every branch, Triton's under TRITON_INTERPRET=1
only."""

import torch

from nsa.geometry import Geometry
from nsa.kernels.registry import BACKENDS, KernelShape

ANY = KernelShape(n_kv_groups=2, heads_per_group=3, d_k=8, d_v=6, geometry=Geometry(l=8, d=4, l_sel=8, n_sel=4, w=16))
_INTERPRETED = BACKENDS["triton"].why_not("sliding", torch.device("cpu"), torch.float32, ANY) is None
RUN_HERE = [name for name in BACKENDS if BACKENDS[name].is_whole and (name != "triton" or _INTERPRETED)]
