"""Options of the enumerated settings (phi, gate, precision, lr_schedule, …), each defined once.

The schema takes the `Literal` types, the code that checks an argument takes the tuples made from them.
"""

from typing import Literal, get_args

AttentionKind = Literal["nsa", "dense", "window", "global", "merged"]
Preset = Literal["base", "paper", "long_256k", "long_1m"]
Phi = Literal["avg", "weighted", "softmax", "linear", "mlp"]
Gate = Literal["softmax", "sigmoid", "tanh"]
GatePer = Literal["head", "group"]
RopeCompressed = Literal["auto", "before", "after"]
KVProjections = Literal["per_branch", "shared_keys", "shared"]
SelectorBlocks = Literal["chosen", "all"]
RopeType = Literal["default", "linear", "llama3", "yarn"]
RopeLayer = Literal["scaled", "plain", "none"]
RopeAngles = Literal["fp64", "fp32"]
QKNormPer = Literal["head", "layer"]
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
PHIS: tuple[Phi, ...] = get_args(Phi)
GATES: tuple[Gate, ...] = get_args(Gate)
GATES_PER: tuple[GatePer, ...] = get_args(GatePer)
ROPE_COMPRESSED: tuple[RopeCompressed, ...] = get_args(RopeCompressed)
KV_PROJECTIONS: tuple[KVProjections, ...] = get_args(KVProjections)
SELECTOR_BLOCKS: tuple[SelectorBlocks, ...] = get_args(SelectorBlocks)
ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)
ROPE_LAYERS: tuple[RopeLayer, ...] = get_args(RopeLayer)
ROPE_ANGLES: tuple[RopeAngles, ...] = get_args(RopeAngles)
QK_NORMS_PER: tuple[QKNormPer, ...] = get_args(QKNormPer)
SYNTHETIC_TASKS: tuple[SyntheticTask, ...] = get_args(SyntheticTask)
CONVERSION_MIXES: tuple[ConversionMix, ...] = get_args(ConversionMix)
