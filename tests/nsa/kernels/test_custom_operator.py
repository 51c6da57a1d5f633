"""Tests of operators that leave torch's compiler alone until something is compiled."""

import subprocess
import sys

from nsa.kernels import ops
from nsa.kernels.custom_operator import custom_operator

PROGRAM = """
import sys, torch
from nsa.kernels.custom_operator import custom_operator

@custom_operator("nsa_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

assert doubled(torch.ones(1)).item() == 2
print("torch._dynamo" in sys.modules)
"""


def test_a_call_does_not_import_the_compiler():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_once_the_compiler_is_imported_the_function_is_hidden_from_it():
    """torch's own wrapper runs then, which a compiled frame does not look into."""
    import torch._dynamo

    frames = []

    @custom_operator("nsa_test::framed", mutates_args=())
    def framed(x: torch.Tensor) -> torch.Tensor:
        frames.append({each.filename.rpartition("/")[2] for each in __import__("traceback").extract_stack()})
        return x * 2

    assert framed(torch.ones(1)).item() == 2
    assert "_compile.py" in frames[0]


def test_torch_keeps_the_function_of_an_operator_where_it_is_replaced():
    """Fails by name if a version of torch keeps it elsewhere."""
    assert set(ops._attend._backend_fns) == {None}
    assert ops._attend._backend_fns[None].__wrapped__ is ops._attend._init_fn
