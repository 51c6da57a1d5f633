"""Configuration schema: every setting of a run with its type, default, unit and description (pydantic models).

Values are frozen and unknown names are refused. Importing this module does not import torch, so a config can be
checked and printed on a machine without it.
"""

import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from nsa.config import rules
from nsa.config.describe import MayChangeOnResume, SettingUnit, ValueDescription
from nsa.errors import ConfigError
from nsa.geometry import Geometry, resolve_rope_compressed
from nsa.options import (
    DataParallel,
    DatasetKind,
    Gate,
    GatePer,
    LearningRateSchedule,
    OnDataEnd,
    Phi,
    Precision,
    RopeCompressed,
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


class ModelConfig(ConfigSection):
    """The transformer around the attention."""

    dim: Count = Field(default=768, description="Width of the residual stream.")
    n_layers: Count = Field(default=12, description="Number of transformer blocks.")
    n_heads: Count = Field(default=12, description="Query heads per block.")
    n_kv_groups: Count = Field(
        default=2, description="Key/value groups; the heads of a group share keys, values, selection."
    )
    d_k: Count = Field(default=64, description="Query and key width per head; even, because RoPE rotates pairs.")
    d_v: Count = Field(default=64, description="Value width per head.")
    vocab_size: Count | None = Field(
        default=None, description="Rows of the embedding; null takes the tokenizer's vocabulary."
    )
    ffn_dim: Count | None = Field(
        default=None, description="Hidden width of the SwiGLU; null means 8/3 of dim, rounded up to a multiple of 64."
    )
    tie_embeddings: bool = Field(default=False, description="Use the input embedding as the output projection too.")
    norm_eps: Positive = Field(default=1e-5, description="Epsilon inside RMSNorm.")
    rope_base: Positive = Field(default=500_000.0, description="Base of the rotary frequencies.")
    rope_scale: Positive = Field(
        default=1.0, description="Positions are divided by this before rotation; > 1 stretches reach."
    )

    @property
    def ffn_size(self) -> int:
        """The SwiGLU's hidden width with null resolved."""
        return self.ffn_dim if self.ffn_dim is not None else default_ffn_dim(self.dim)

    @model_validator(mode="after")
    def _hold_together(self) -> Self:
        return rules.enforce(self, rules.check_model(self.n_heads, self.n_kv_groups, self.d_k))


class NSAConfig(ConfigSection):
    """Native Sparse Attention: the three branches and the gate that mixes them."""

    l: Tokens = Field(default=Geometry.l, description="Length of a compression block.")
    d: Tokens = Field(default=Geometry.d, description="Stride between compression blocks; divides l and l_sel.")
    l_sel: Tokens = Field(default=Geometry.l_sel, description="Length of a selection block.")
    n_sel: Annotated[int, Field(ge=1), SettingUnit("blocks")] = Field(
        default=Geometry.n_sel, description="Selection blocks each query reads, the first and two local ones included."
    )
    w: Tokens = Field(default=Geometry.w, description="Sliding window, the query's own token included.")
    phi: Phi = Field(default="avg", description="Operator that compresses a block to one token.")
    phi_pos_emb: bool = Field(
        default=False, description="Learned position inside a block, added before phi (linear, mlp)."
    )
    gate: Gate = Field(
        default="softmax",
        description="softmax: branch weights sum to 1 (the health limits assume it); sigmoid: as in the paper.",
    )
    gate_per: GatePer = Field(default="head", description="One gate per query head or per group of heads.")
    gate_temperature: Positive = Field(
        default=1.0, description="Gate logits are divided by this; above 1 evens the branches out."
    )
    rope_compressed: RopeCompressed = Field(
        default="auto",
        description="Rotate keys before compression or compressed keys after it; auto: before for avg, else after.",
    )

    @property
    def geometry(self) -> Geometry:
        """The block sizes, for everything that computes with them."""
        return Geometry(self.l, self.d, self.l_sel, self.n_sel, self.w)

    @field_validator("rope_compressed")
    @classmethod
    def _resolve_auto(cls, value: str, info: ValidationInfo) -> str:
        """Everything that reads or records the settings sees what `auto` came to."""
        return resolve_rope_compressed(info.data["phi"], value) if "phi" in info.data else value

    @model_validator(mode="after")
    def _hold_together(self) -> Self:
        sizes = {name: getattr(self, name) for name in Geometry.__dataclass_fields__}
        return rules.enforce(self, rules.check_nsa(sizes, self.phi, self.phi_pos_emb, self.rope_compressed))


class RuntimeConfig(ConfigSection):
    """Where and in which arithmetic a run computes."""

    device: Changeable[
        Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), ValueDescription("auto, cpu, cuda or cuda:N")]
    ] = Field(default="auto", description="cpu, cuda, cuda:N, or auto: a GPU if there is one, decided once and logged.")
    precision: Changeable[Precision] = Field(
        default="bf16",
        description="Arithmetic of the model; the loss is fp32 always. Long runs want bf16; training refuses fp16.",
    )
    gradient_checkpointing: Changeable[bool] = Field(
        default=False, description="Recompute activations in backward: less memory, more time."
    )
    use_flash: Changeable[bool] = Field(
        default=True, description="Let kernels=auto take fused kernels; false keeps it to the portable backend."
    )
    prefill_chunk: Changeable[Tokens] = Field(
        default=2048, description="Prompt tokens per prefill pass when generating; no command reads it yet."
    )
    threads: Changeable[Count | None] = Field(
        default=None,
        description="CPU threads for torch; null leaves torch's choice. Bitwise resume needs the same number.",
    )
    kernel_cache: Changeable[Text | None] = Field(
        default=None,
        description="Folder that keeps compiled CPU kernels and tuned tiles; null is the user's cache folder.",
    )
    tune_kernels: Changeable[bool] = Field(
        default=False,
        description="Time tile sizes on the GPU at first use and keep the fastest; without, all GPUs of a kind give "
        "equal bits.",
    )


class KernelsConfig(ConfigSection):
    """One backend per branch. A backend asked for by name that cannot run is an error, never replaced."""

    compressed: Changeable[Text] = Field(
        default="auto", description="Backend of compressed attention; auto picks and logs the reason."
    )
    select: Changeable[Text] = Field(default="auto", description="Backend that scores and picks the selection blocks.")
    selected: Changeable[Text] = Field(default="auto", description="Backend of attention over the selected blocks.")
    sliding: Changeable[Text] = Field(default="auto", description="Backend of sliding-window attention.")


class TrainConfig(ConfigSection):
    """Length, batch, optimizer and rhythm of a training run."""

    steps: Changeable[Steps] = Field(default=1000, description="Optimizer steps in the whole run.")
    seq_len: Tokens = Field(default=2048, description="Length of a training row.")
    batch_size: Changeable[Annotated[int, Field(ge=1), SettingUnit("rows")]] = Field(
        default=1, description="Rows per forward pass over all ranks together; a multiple of the number of ranks."
    )
    accumulate_grad_batches: Changeable[Count] = Field(
        default=1, description="Forward passes per optimizer step; a step sees batch_size times this many rows."
    )
    lr: Changeable[Positive] = Field(default=3e-4, description="Peak learning rate, reached at the end of warm-up.")
    lr_schedule: Changeable[LearningRateSchedule] = Field(default="cosine", description="Learning rate after warm-up.")
    warmup_steps: Changeable[Annotated[int, Field(ge=0), SettingUnit("steps")]] = Field(
        default=0, description="Steps of linear warm-up from zero."
    )
    final_lr_ratio: Changeable[Annotated[float, Field(ge=0, le=1)]] = Field(
        default=0.1, description="Share of lr that cosine and linear schedules end with."
    )
    weight_decay: Changeable[Annotated[float, Field(ge=0)]] = Field(default=0.01, description="AdamW weight decay.")
    grad_clip: Changeable[Annotated[float, Field(ge=0)]] = Field(
        default=1.0, description="Largest gradient norm; 0 does not clip."
    )
    max_skipped: Changeable[Annotated[int, Field(ge=0), SettingUnit("steps")]] = Field(
        default=3,
        description="Non-finite or spiking steps of any skip_window that are skipped; one more and the run goes back.",
    )
    max_rollbacks: Changeable[Annotated[int, Field(ge=0)]] = Field(
        default=3,
        description="Times a run may go back to its last checkpoint, leaving out the batches since; then it stops.",
    )
    skip_window: Changeable[Steps] = Field(default=128, description="Steps back that max_skipped and spike_sigma look.")
    spike_sigma: Changeable[Annotated[float, Field(ge=0)]] = Field(
        default=0.0,
        description="Skip steps whose loss or gradient norm is this many sigma above its window; 0 skips none.",
    )
    replica_check_every: Changeable[StepsOrNever] = Field(
        default=0, description="Steps between checks that replicas of the weights (ddp, hsdp) are equal bit for bit."
    )
    log_every: Changeable[Steps] = Field(default=20, description="Steps between progress records.")
    eval_every: Changeable[StepsOrNever] = Field(
        default=1000, description="Steps between evaluations on the held-out split."
    )
    eval_batches: Changeable[Count] = Field(
        default=16, description="Batches of the held-out split that an evaluation reads."
    )
    save_every: Changeable[StepsOrNever] = Field(
        default=1000, description="Steps between checkpoints; the end of a run is always saved."
    )
    save_async: Changeable[bool] = Field(
        default=True, description="Write checkpoints in the background while training goes on."
    )
    keep_checkpoints: Changeable[Count] = Field(
        default=3, description="Newest checkpoints to keep; older ones are removed, unless another setting keeps them."
    )
    keep_every: Changeable[StepsOrNever] = Field(
        default=0,
        description="Checkpoints at multiples of this step are kept for good, besides the newest; 0 keeps none. Those "
        "asked for by USR2 always stay.",
    )
    checkpoint_key_file: Changeable[str | None] = Field(
        default=None, description="File with a key that signs checkpoints; only signed ones are then loaded."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=1337, description="Seeds weights, data order and the held-out split."
    )
    out_dir: Changeable[Text] = Field(default="artifacts/run", description="The run folder; one run, one folder.")

    @model_validator(mode="after")
    def _hold_together(self) -> Self:
        return rules.enforce(self, rules.check_train(self.steps, self.warmup_steps, self.save_every, self.keep_every))


class ParallelConfig(ConfigSection):
    """How several ranks share a run; with one rank nothing of it matters."""

    data: Changeable[DataParallel] = Field(
        default="ddp",
        description="ddp: whole weights on every rank; fsdp: sharded over all; hsdp: sharded in groups of shard_ranks.",
    )
    shard_ranks: Changeable[Annotated[int, Field(ge=1), SettingUnit("ranks")] | None] = Field(
        default=None, description="Ranks that hold one copy of the weights together (hsdp); null means one node's."
    )
    timeout_s: Changeable[Seconds] = Field(
        default=600.0, description="Longest wait for other ranks before a run fails."
    )


class DataConfig(ConfigSection):
    """Where the tokens come from."""

    dataset: DatasetKind = Field(
        default="fineweb_edu",
        description="Streamed parquet, your own parquet/JSONL, token shards made earlier, or made-up tasks.",
    )
    path: Changeable[Text | None] = Field(
        default=None, description="Hub id, URL, folder or prepared folder; null is right for fineweb_edu and synthetic."
    )
    tokenizer: Changeable[Text] = Field(default="byte", description="byte, or the path of a tokenizers JSON file.")
    held_out: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.001, description="Share of the documents kept for evaluation and never trained on."
    )
    packing: RowPacking = Field(
        default="stream", description="stream cuts documents at row ends; best_fit keeps them whole where they fit."
    )
    on_end: Changeable[OnDataEnd] = Field(
        default="epoch", description="Data used up: start another epoch, or stop with an error."
    )
    queue_depth: Changeable[Annotated[int, Field(ge=1), SettingUnit("batches")]] = Field(
        default=8, description="Batches the prefetcher keeps ready."
    )
    prefetch: Changeable[bool] = Field(
        default=True, description="Prepare batches in the background while the step computes."
    )
    warmup_batches: Changeable[Annotated[int, Field(ge=0), SettingUnit("batches")]] = Field(
        default=0, description="Batches to have ready before step 1; hides a slow first fetch."
    )
    warmup_timeout_s: Changeable[Seconds] = Field(default=60.0, description="Longest wait for the warm-up batches.")
    loader_timeout_s: Changeable[Seconds] = Field(
        default=120.0, description="Longest wait for any one batch before the run stops."
    )
    report_docs: Changeable[Annotated[int, Field(ge=0), SettingUnit("documents, 0 = never")]] = Field(
        default=1000, description="Documents between progress lines of the data reader."
    )
    max_bad_units: Changeable[Annotated[int, Field(ge=0), SettingUnit("row groups")]] = Field(
        default=8, description="Unreadable pieces of data to skip, each with a warning, before the run stops."
    )
    cache_dir: Changeable[Text | None] = Field(
        default=None,
        description="Folder for fetched shards, hub listings and unit checksums; null: checksums in the run folder.",
    )
    cache_gib: Changeable[Annotated[float, Field(gt=0), SettingUnit("GiB")]] = Field(
        default=16.0, description="Disk the download cache may fill."
    )
    synthetic_task: SyntheticTask = Field(
        default="copy", description="Synthetic data: random tokens, a repeated sequence, or one fact to find again."
    )
    synthetic_on_fail: Changeable[bool] = Field(
        default=False,
        description="Train on synthetic data if the dataset fails: loud, recorded, refused for long runs.",
    )

    @model_validator(mode="after")
    def _hold_together(self) -> Self:
        return rules.enforce(self, rules.check_data(self.dataset, self.path))


class TrackConfig(ConfigSection):
    """Copies of the heartbeat for trackers of experiments. One that is slow or down costs records, never a step."""

    name: Changeable[Text | None] = Field(
        default=None, description="What trackers call the run; null takes the run folder's name."
    )
    wandb_project: Changeable[Text | None] = Field(
        default=None, description="Weights & Biases project; null sends nothing. WANDB_API_KEY must be set."
    )
    wandb_entity: Changeable[Text | None] = Field(
        default=None, description="Weights & Biases team or user; null is the key's own."
    )
    mlflow_uri: Changeable[Text | None] = Field(
        default=None, description="MLflow tracking server, e.g. http://127.0.0.1:5000."
    )
    mlflow_experiment: Changeable[Text] = Field(default="nsa", description="MLflow experiment that the run appears in.")


class RunConfig(ConfigSection):
    """A whole run, resolved. `nsa.config.load` makes one from files, environment and command line."""

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
        """What the reader should know about how this config was resolved, e.g. retired names it used."""
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
        """Where a value came from: a file and line, a profile, the environment, the command line, or the default."""
        value = self.value(key)
        if key in self._origins:
            return self._origins[key]
        section, _, name = key.rpartition(".")
        given = name in (getattr(self, section) if section else self).model_fields_set
        return "code" if given and value != settings()[key].default else "default"

    def origins(self) -> dict[str, str]:
        return {key: self.origin(key) for key in settings()}


# Keys that configs still carry from earlier systems: they load, do nothing, and say what took their place.
RETIRED_KEYS = {
    "runtime.use_triton_sel": "the backend of each branch is chosen by kernels.selected and kernels.select",
    "runtime.sel_triton_min_L": "kernels.selected=auto weighs the length itself",
    "runtime.fa2_enabled": "flash-attn is not used; kernels.sliding and kernels.compressed choose the backend",
    "runtime.fa2_min_len_win": "kernels.sliding=auto weighs the length itself",
    "runtime.fa2_min_len_cmp": "kernels.compressed=auto weighs the length itself",
}


@cache
def sections() -> Mapping[str, type[ConfigSection]]:
    """Section name → its class, in the order they are documented."""
    return types.MappingProxyType(
        {
            name: field.annotation
            for name, field in RunConfig.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection)
        }
    )


@cache
def settings() -> Mapping[str, FieldInfo]:
    """Dotted key → its field, e.g. `train.lr`, in the order they are documented."""
    found = {name: field for name, field in RunConfig.model_fields.items() if name not in sections()}
    for section, cls in sections().items():
        found |= {f"{section}.{name}": field for name, field in cls.model_fields.items()}
    return types.MappingProxyType(found)
