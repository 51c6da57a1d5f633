"""Options of the enumerated settings (precision, lr_schedule, kinds of layers, …), each defined once.

Those of an attention layer are in `nsa.core.attention_config`. The schema takes the `Literal` types, the code that
checks an argument takes the tuples made from them.
"""

from typing import Literal, get_args

AttentionKind = Literal["nsa", "dense", "window", "global", "merged"]
Preset = Literal["base", "paper", "long_256k", "long_1m"]
RopeLayer = Literal["scaled", "plain", "none"]
Precision = Literal["bf16", "fp16", "fp32"]
Checkpointing = Literal["off", "selective", "full"]
Compilation = Literal["auto", "on", "off"]
LearningRateSchedule = Literal["cosine", "linear", "constant"]
DataParallel = Literal["ddp", "fsdp", "hsdp"]
ContextSplit = Literal["zigzag", "contiguous"]
DatasetKind = Literal["fineweb_edu", "local", "prepared", "synthetic"]
RowPacking = Literal["stream", "best_fit"]
OnDataEnd = Literal["epoch", "error"]
ConversionMix = Literal["merged", "gated"]
SyntheticTask = Literal["uniform", "copy", "needle", "recall", "recall_pairs", "tracking"]

CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
SELECTING_KINDS: tuple[AttentionKind, ...] = ("nsa", "global", "merged")
SYNTHETIC_TASKS: tuple[SyntheticTask, ...] = get_args(SyntheticTask)
CONVERSION_MIXES: tuple[ConversionMix, ...] = get_args(ConversionMix)
