"""Options of the enumerated settings (phi, gate, precision, lr_schedule, …), each defined once.

The schema takes the `Literal` types, the code that checks an argument takes the tuples made from them.
"""

from typing import Literal, get_args

Phi = Literal["avg", "linear", "mlp"]
Gate = Literal["softmax", "sigmoid"]
GatePer = Literal["head", "group"]
RopeCompressed = Literal["auto", "before", "after"]
Precision = Literal["bf16", "fp16", "fp32"]
LearningRateSchedule = Literal["cosine", "linear", "constant"]
DataParallel = Literal["ddp", "fsdp", "hsdp"]
DatasetKind = Literal["fineweb_edu", "local", "prepared", "synthetic"]
RowPacking = Literal["stream", "best_fit"]
OnDataEnd = Literal["epoch", "error"]
SyntheticTask = Literal["uniform", "copy", "needle"]

PHIS: tuple[Phi, ...] = get_args(Phi)
GATES: tuple[Gate, ...] = get_args(Gate)
GATES_PER: tuple[GatePer, ...] = get_args(GatePer)
ROPE_COMPRESSED: tuple[RopeCompressed, ...] = get_args(RopeCompressed)
SYNTHETIC_TASKS: tuple[SyntheticTask, ...] = get_args(SyntheticTask)
