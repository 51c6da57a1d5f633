"""Configuration schema: every setting of a run with its type, default, unit and description (pydantic models).

Values are frozen and unknown names are refused. Importing this module does not import torch, so a config can be
checked and printed on a machine without it.
"""

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from nsa.attention_rules import resolve_rope_compressed
from nsa.config import rules
from nsa.config.describe import MayChangeOnResume, SettingUnit, ValueDescription
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.options import (
    DataParallel,
    DatasetKind,
    Gate,
    GatePer,
    KVProjections,
    LearningRateSchedule,
    OnDataEnd,
    Phi,
    Precision,
    RopeCompressed,
    RopeType,
    RowPacking,
    SyntheticTask,
)

Count = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1), SettingUnit("tokens")]
Steps = Annotated[int, Field(ge=1), SettingUnit("steps")]
StepsOrNever = Annotated[int, Field(ge=0), SettingUnit("steps, 0 = never")]
Seconds = Annotated[float, Field(gt=0), SettingUnit("seconds")]
Positive = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]

T = TypeVar("T")
Changeable = Annotated[T, MayChangeOnResume()]
"""A setting that may differ from the checkpoint that a run resumes from. Every other setting may not."""

FFN_MULTIPLE = 64


def default_ffn_dim(dim: int) -> int:
    """8/3 of the model dim (as many parameters as a plain feed-forward of 4·dim), rounded up to a multiple of 64."""
    return -(-8 * dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


class ConfigSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class RopeScalingConfig(ConfigSection):
    """RoPE scaling for a longer context, with the keys of `rope_scaling` in a Hugging Face config."""

    rope_type: RopeType = Field(default="default", description="Kind of scaling; default is none.")
    factor: Positive | None = Field(
        default=None, description="Divisor of the scaled frequencies: how much longer the context becomes."
    )
    original_max_position_embeddings: Tokens | None = Field(
        default=None, description="Context length before scaling (llama3, yarn)."
    )
    low_freq_factor: Positive | None = Field(
        default=None,
        description="Pairs with fewer turns than this within the original context are divided by factor (llama3).",
    )
    high_freq_factor: Positive | None = Field(
        default=None,
        description="Pairs with more turns than this within the original context keep their frequency (llama3).",
    )
    beta_fast: Positive | None = Field(
        default=None, description="As high_freq_factor, for yarn; null means 32. Between the two, a linear ramp."
    )
    beta_slow: Positive | None = Field(default=None, description="As low_freq_factor, for yarn; null means 1.")
    truncate: bool | None = Field(
        default=None, description="Round the ends of yarn's ramp to whole pairs; null means true."
    )
    attention_factor: Positive | None = Field(
        default=None, description="Multiplier of cosines and sines (yarn); null means 0.1 · ln(factor) + 1."
    )
    mscale: Positive | None = Field(
        default=None,
        description="With mscale_all_dim, replaces the 0.1 of attention_factor by a ratio of two such terms (yarn).",
    )
    mscale_all_dim: Positive | None = Field(default=None, description="Divisor of that ratio; see mscale.")

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, as `NSAAttention` takes them."""
        return self.model_dump(exclude_none=True)


class ModelConfig(ConfigSection):
    """Sizes and options of the transformer."""

    dim: Count = Field(default=768, description="Width of the residual stream.")
    n_layers: Count = Field(default=12, description="Number of transformer blocks.")
    n_heads: Count = Field(default=12, description="Query heads per block.")
    n_kv_groups: Count = Field(
        default=2, description="Key/value groups; the heads of a group share keys, values and selected blocks."
    )
    d_k: Count = Field(default=64, description="Query and key width per head; even, because RoPE rotates pairs.")
    d_v: Count = Field(default=64, description="Value width per head.")
    vocab_size: Count | None = Field(
        default=None, description="Rows of the embedding; null uses the tokenizer's vocabulary size."
    )
    ffn_dim: Count | None = Field(
        default=None, description="Hidden width of the SwiGLU; null means 8/3 of dim, rounded up to a multiple of 64."
    )
    tie_embeddings: bool = Field(default=False, description="Share the input embedding with the output projection.")
    norm_eps: Positive = Field(default=1e-5, description="Epsilon inside RMSNorm.")
    rope_base: Positive = Field(default=500_000.0, description="Base of the rotary frequencies.")
    rope_scale: Positive = Field(
        default=1.0, description="Positions are divided by this before rotation (linear RoPE scaling)."
    )
    qk_norm: bool = Field(
        default=False, description="RMSNorm over each head of queries and keys before RoPE (with norm_eps)."
    )
    qkv_bias: bool = Field(default=False, description="Biases of the query, key and value projections.")
    attention_out_bias: bool = Field(
        default=False,
        description="Bias of the attention's output projection; both are attention_bias in a Hugging Face config.",
    )
    rope_scaling: RopeScalingConfig = RopeScalingConfig()

    @property
    def ffn_size(self) -> int:
        """Hidden width of the SwiGLU; the default if `ffn_dim` is null."""
        return self.ffn_dim if self.ffn_dim is not None else default_ffn_dim(self.dim)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        heads, rope = (self.n_heads, self.n_kv_groups, self.d_k), (self.rope_scaling.given, self.rope_scale)
        return rules.enforce(self, rules.check_model(*heads, *rope))


class NSAConfig(ConfigSection):
    """Native Sparse Attention: the three branches and the gate that mixes them."""

    l: Tokens = Field(default=Geometry.l, description="Length of a compression block.")
    d: Tokens = Field(default=Geometry.d, description="Stride between compression blocks; divides l and l_sel.")
    l_sel: Tokens = Field(default=Geometry.l_sel, description="Length of a selection block.")
    n_sel: Annotated[int, Field(ge=1), SettingUnit("blocks")] = Field(
        default=Geometry.n_sel, description="Selected blocks per query, including the first block and two local ones."
    )
    w: Tokens = Field(default=Geometry.w, description="Length of the sliding window, including the query's own token.")
    phi: Phi = Field(default="avg", description="Compression operator that pools a block into one token.")
    phi_pos_emb: bool = Field(
        default=False, description="Learned intra-block position embedding, added before phi (linear, mlp)."
    )
    gate: Gate = Field(
        default="softmax",
        description="softmax: branch weights sum to 1 (the health limits assume it); sigmoid: as in the paper.",
    )
    gate_per: GatePer = Field(default="head", description="One gate per query head or per group of heads.")
    gate_temperature: Positive = Field(
        default=1.0, description="Gate logits are divided by this; a value above 1 makes the branch weights more equal."
    )
    rope_compressed: RopeCompressed = Field(
        default="auto",
        description="Rotate keys before compression or compressed keys after it; auto: before for avg, else after.",
    )
    kv: KVProjections = Field(
        default="per_branch",
        description="Keys and values: one projection per branch as in the paper, or one shared by the three branches.",
    )

    @property
    def geometry(self) -> Geometry:
        """The block sizes, for everything that computes with them."""
        return Geometry(self.l, self.d, self.l_sel, self.n_sel, self.w)

    @field_validator("rope_compressed")
    @classmethod
    def _resolve_auto(cls, value: str, info: ValidationInfo) -> str:
        """Resolve `auto`, so that everything that reads or records the settings sees the result."""
        return resolve_rope_compressed(info.data["phi"], value) if "phi" in info.data else value

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        sizes = {name: getattr(self, name) for name in Geometry.__dataclass_fields__}
        return rules.enforce(self, rules.check_nsa(sizes, self.phi, self.phi_pos_emb, self.rope_compressed))


class RuntimeConfig(ConfigSection):
    """Device, precision and memory options."""

    device: Changeable[
        Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), ValueDescription("auto, cpu, cuda or cuda:N")]
    ] = Field(default="auto", description="cpu, cuda, cuda:N, or auto: a GPU if there is one, chosen once and logged.")
    precision: Changeable[Precision] = Field(
        default="bf16",
        description="Compute precision; the loss is always fp32. Long runs need bf16; fp16 cannot train.",
    )
    gradient_checkpointing: Changeable[bool] = Field(
        default=False,
        description="Recompute activations in the backward pass: less memory, more time.",
    )
    use_flash: Changeable[bool] = Field(
        default=True, description="Let kernels=auto select fused kernels; false restricts it to the portable backend."
    )
    prefill_chunk: Changeable[Tokens] = Field(
        default=2048, description="Prompt tokens per prefill pass when generating; no command reads it yet."
    )
    threads: Changeable[Count | None] = Field(
        default=None,
        description="CPU threads of torch; null keeps torch's default. Bitwise resume needs the same number.",
    )
    kernel_cache: Changeable[Text | None] = Field(
        default=None,
        description="Folder for compiled CPU kernels and tuned tile sizes; null is the user's cache folder.",
    )
    tune_kernels: Changeable[bool] = Field(
        default=False,
        description="Time tile sizes on the GPU at first use and keep the fastest; if false, GPUs of one model give "
        "bitwise equal results.",
    )


class KernelsConfig(ConfigSection):
    """Kernel backend of each branch. A backend requested by name that cannot run is an error, never replaced."""

    compressed: Changeable[Text] = Field(
        default="auto", description="Backend of compressed attention; auto selects one and logs the reason."
    )
    select: Changeable[Text] = Field(default="auto", description="Backend of top-n block selection.")
    selected: Changeable[Text] = Field(default="auto", description="Backend of attention over the selected blocks.")
    sliding: Changeable[Text] = Field(default="auto", description="Backend of sliding-window attention.")


class TrainConfig(ConfigSection):
    """Length, batch size, optimizer, logging and checkpoints of a training run."""

    steps: Changeable[Steps] = Field(default=1000, description="Optimizer steps of the whole run.")
    seq_len: Tokens = Field(default=2048, description="Length of a training row.")
    batch_size: Changeable[Annotated[int, Field(ge=1), SettingUnit("rows")]] = Field(
        default=1, description="Rows per forward pass, summed over all ranks; a multiple of the number of ranks."
    )
    accumulate_grad_batches: Changeable[Count] = Field(
        default=1,
        description="Forward passes per step; batch_size times this is the global batch size.",
    )
    lr: Changeable[Positive] = Field(default=3e-4, description="Peak learning rate, reached at the end of warm-up.")
    lr_schedule: Changeable[LearningRateSchedule] = Field(
        default="cosine", description="Learning rate schedule after warm-up."
    )
    warmup_steps: Changeable[Annotated[int, Field(ge=0), SettingUnit("steps")]] = Field(
        default=0, description="Steps of linear warm-up from zero."
    )
    final_lr_ratio: Changeable[Annotated[float, Field(ge=0, le=1)]] = Field(
        default=0.1, description="Final learning rate of cosine and linear schedules, as a fraction of lr."
    )
    weight_decay: Changeable[Annotated[float, Field(ge=0)]] = Field(default=0.01, description="AdamW weight decay.")
    grad_clip: Changeable[Annotated[float, Field(ge=0)]] = Field(
        default=1.0, description="Gradient norm above which gradients are clipped; 0 disables clipping."
    )
    max_skipped: Changeable[Annotated[int, Field(ge=0), SettingUnit("steps")]] = Field(
        default=3,
        description="Non-finite or spiking steps skipped within skip_window; one more triggers a rollback.",
    )
    max_rollbacks: Changeable[Annotated[int, Field(ge=0)]] = Field(
        default=3,
        description="Rollbacks to the last checkpoint, skipping the batches since then, before the run stops.",
    )
    skip_window: Changeable[Steps] = Field(
        default=128, description="Number of recent steps used by max_skipped and spike_sigma."
    )
    spike_sigma: Changeable[Annotated[float, Field(ge=0)]] = Field(
        default=0.0,
        description="Skip steps whose loss or gradient norm is this many sigma above the window; 0 disables it.",
    )
    replica_check_every: Changeable[StepsOrNever] = Field(
        default=0, description="Steps between bitwise comparisons of replicated weights (ddp, hsdp)."
    )
    log_every: Changeable[Steps] = Field(default=20, description="Steps between progress records.")
    eval_every: Changeable[StepsOrNever] = Field(
        default=1000, description="Steps between evaluations on the held-out split."
    )
    eval_batches: Changeable[Count] = Field(default=16, description="Batches of the held-out split per evaluation.")
    save_every: Changeable[StepsOrNever] = Field(
        default=1000, description="Steps between checkpoints; the last step is always saved."
    )
    save_async: Changeable[bool] = Field(
        default=True, description="Write checkpoints in the background during training."
    )
    keep_checkpoints: Changeable[Count] = Field(
        default=3,
        description="Newest checkpoints to keep; older ones are removed, unless another setting keeps them.",
    )
    keep_every: Changeable[StepsOrNever] = Field(
        default=0,
        description="Checkpoints at multiples of this step are never removed; 0 keeps only the newest. Those requested "
        "by USR2 are never removed.",
    )
    checkpoint_key_file: Changeable[str | None] = Field(
        default=None,
        description="File with a key that signs checkpoints; only signed ones are then loaded.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=1337, description="Random seed of weights, data order and held-out split."
    )
    out_dir: Changeable[Text] = Field(default="artifacts/run", description="The run folder; one run, one folder.")

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        return rules.enforce(self, rules.check_train(self.steps, self.warmup_steps, self.save_every, self.keep_every))


class ParallelConfig(ConfigSection):
    """Data parallelism; unused with one rank."""

    data: Changeable[DataParallel] = Field(
        default="ddp",
        description="ddp: replicated weights; fsdp: sharded over all ranks; hsdp: sharded in groups of shard_ranks.",
    )
    shard_ranks: Changeable[Annotated[int, Field(ge=1), SettingUnit("ranks")] | None] = Field(
        default=None, description="Ranks that share one copy of the weights (hsdp); null: the ranks of one node."
    )
    timeout_s: Changeable[Seconds] = Field(
        default=600.0, description="Timeout of collectives: longest wait for other ranks before a run fails."
    )


class DataConfig(ConfigSection):
    """Dataset, tokenizer, packing and prefetching."""

    dataset: DatasetKind = Field(
        default="fineweb_edu",
        description="Streamed parquet, your own parquet or JSONL, prepared token shards, or synthetic tasks.",
    )
    path: Changeable[Text | None] = Field(
        default=None, description="Hub id, URL, folder or prepared folder; null is right for fineweb_edu and synthetic."
    )
    tokenizer: Changeable[Text] = Field(default="byte", description="byte, or the path of a tokenizers JSON file.")
    held_out: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.001, description="Fraction of the documents held out for evaluation and never trained on."
    )
    packing: RowPacking = Field(
        default="stream", description="stream cuts documents at row ends; best_fit keeps them whole where they fit."
    )
    on_end: Changeable[OnDataEnd] = Field(
        default="epoch", description="At the end of the data: start another epoch, or stop with an error."
    )
    queue_depth: Changeable[Annotated[int, Field(ge=1), SettingUnit("batches")]] = Field(
        default=8, description="Batches the prefetcher keeps ready."
    )
    prefetch: Changeable[bool] = Field(
        default=True, description="Prepare batches in the background while the step computes."
    )
    warmup_batches: Changeable[Annotated[int, Field(ge=0), SettingUnit("batches")]] = Field(
        default=0, description="Batches to prefetch before step 1; hides a slow first fetch."
    )
    warmup_timeout_s: Changeable[Seconds] = Field(default=60.0, description="Longest wait for the warm-up batches.")
    loader_timeout_s: Changeable[Seconds] = Field(
        default=120.0, description="Longest wait for one batch before the run stops."
    )
    report_docs: Changeable[Annotated[int, Field(ge=0), SettingUnit("documents, 0 = never")]] = Field(
        default=1000, description="Documents between progress lines of the data reader."
    )
    max_bad_units: Changeable[Annotated[int, Field(ge=0), SettingUnit("row groups")]] = Field(
        default=8, description="Unreadable row groups to skip, each with a warning, before the run stops."
    )
    cache_dir: Changeable[Text | None] = Field(
        default=None,
        description="Folder for fetched shards, hub listings and unit checksums; null: checksums in the run folder.",
    )
    cache_gib: Changeable[Annotated[float, Field(gt=0), SettingUnit("GiB")]] = Field(
        default=16.0, description="Largest size of the download cache."
    )
    synthetic_task: SyntheticTask = Field(
        default="copy", description="Synthetic task: random tokens, a sequence to copy, or a value to retrieve."
    )
    synthetic_on_fail: Changeable[bool] = Field(
        default=False,
        description="Train on synthetic data if the dataset fails; logged, recorded, and refused for long runs.",
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        return rules.enforce(self, rules.check_data(self.dataset, self.path))


class TrackConfig(ConfigSection):
    """Experiment tracking with W&B and MLflow. A slow or unavailable service drops records, never blocks training."""

    name: Changeable[Text | None] = Field(
        default=None, description="Name of the run in the trackers; null uses the name of the run folder."
    )
    wandb_project: Changeable[Text | None] = Field(
        default=None, description="Weights & Biases project; null disables it. WANDB_API_KEY must be set."
    )
    wandb_entity: Changeable[Text | None] = Field(
        default=None, description="Weights & Biases team or user; null is the owner of the API key."
    )
    mlflow_uri: Changeable[Text | None] = Field(
        default=None, description="MLflow tracking server, e.g. http://127.0.0.1:5000."
    )
    mlflow_experiment: Changeable[Text] = Field(default="nsa", description="MLflow experiment of the run.")


class RunConfig(ConfigSection):
    """A resolved run. `nsa.config.load` builds one from files, environment and command line."""

    TOY: ClassVar[str] = "toy"

    profile: Changeable[Text | None] = Field(
        None,
        description="Hardware profile (configs/profiles/NAME.yaml, or a path); toy marks a config unfit for long runs.",
    )
    model: ModelConfig = ModelConfig()
    nsa: NSAConfig = NSAConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    kernels: KernelsConfig = KernelsConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    track: TrackConfig = TrackConfig()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def resolved(cls, values: Mapping[str, Any], origins: Mapping[str, str], notices: tuple[str, ...]) -> Self:
        config = cls.model_validate(values)
        config._origins = dict(origins)
        config._notices = notices
        return config

    @property
    def is_toy(self) -> bool:
        return self.profile == self.TOY

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes on how this config was resolved, e.g. retired names that were ignored."""
        return self._notices

    def value(self, key: str) -> Any:
        """The value of a dotted key such as `train.lr`."""
        if key not in settings():
            raise ConfigError(f"{key!r} is not a setting. `nsa config show FILE` lists them all.")
        found: Any = self
        for part in key.split("."):
            found = getattr(found, part)
        return found

    def origin(self, key: str) -> str:
        """Origin of a value: file and line, profile, environment variable, command line, or default."""
        value = self.value(key)
        if key in self._origins:
            return self._origins[key]
        *path, name = key.split(".")
        section: ConfigSection = self
        for part in path:
            section = getattr(section, part)
        given = name in section.model_fields_set
        return "code" if given and value != settings()[key].default else "default"

    def origins(self) -> dict[str, str]:
        return {key: self.origin(key) for key in settings()}


# Keys of earlier systems that old configs contain: accepted, ignored, and reported with their replacement.
RETIRED_KEYS = {
    "runtime.use_triton_sel": "the backend of each branch is chosen by kernels.selected and kernels.select",
    "runtime.sel_triton_min_L": "kernels.selected=auto depends on the length",
    "runtime.fa2_enabled": "flash-attn is not used; kernels.sliding and kernels.compressed choose the backend",
    "runtime.fa2_min_len_win": "kernels.sliding=auto depends on the length",
    "runtime.fa2_min_len_cmp": "kernels.compressed=auto depends on the length",
}


@cache
def sections() -> Mapping[str, type[ConfigSection]]:
    """Dotted section name → its class, in the order they are documented, e.g. `model` and `model.rope_scaling`."""
    return types.MappingProxyType(dict(_sections_of(RunConfig)))


def _sections_of(outer: type[ConfigSection], prefix: str = "") -> Iterator[tuple[str, type[ConfigSection]]]:
    for name, field in outer.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection):
            yield f"{prefix}{name}", field.annotation
            yield from _sections_of(field.annotation, f"{prefix}{name}.")


@cache
def settings() -> Mapping[str, FieldInfo]:
    """Dotted key → its field, e.g. `train.lr`, in the order they are documented."""
    found = dict(RunConfig.model_fields)
    for section, cls in sections().items():
        found |= {f"{section}.{name}": field for name, field in cls.model_fields.items()}
    return types.MappingProxyType({key: field for key, field in found.items() if key not in sections()})
