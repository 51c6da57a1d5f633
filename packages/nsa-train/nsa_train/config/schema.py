"""Configuration schema: every setting of a run with its type, default, unit and description (pydantic models).

Values are frozen and unknown names are refused. Importing this module does not import torch, so a config can be
checked and printed on a machine without it.
"""

import types
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from nsa.core.attention_config import AttentionConfig
from nsa.errors import ConfigError
from nsa.options import (
    ContextSplit,
    DataParallel,
    DatasetKind,
    LearningRateSchedule,
    OnDataEnd,
    RowPacking,
    SyntheticTask,
)
from nsa_train.config import rules
from nsa_train.config.model_sections import (
    PRESETS,
    KernelsConfig,
    ModelConfig,
    RuntimeConfig,
    SparseAttentionConfig,
)
from nsa_train.config.setting_types import (
    TEXT_OR_LIST,
    WEIGHTS,
    Changeable,
    ConfigSection,
    Count,
    Positive,
    Seconds,
    SettingUnit,
    Steps,
    StepsOrNever,
    Text,
    Tokens,
    ValueDescription,
)


class TrainConfig(ConfigSection):
    """Length, batch size, optimizer, logging and checkpoints of a training run."""

    steps: Changeable[Steps] = Field(default=1000, description="Optimizer steps of the whole run.")
    seq_len: Tokens = Field(default=2048, description="Length of a training row.")
    batch_size: Changeable[Annotated[int, Field(ge=1), SettingUnit("rows")]] = Field(
        default=1, description="Rows per forward pass, summed over all ranks; a multiple of the data-parallel ranks."
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
    trainable: Annotated[
        tuple[Text, ...], Field(min_length=1), TEXT_OR_LIST, ValueDescription("a pattern of names, or a list")
    ] = Field(
        default=("*",),
        description="Parameters that are trained, by glob patterns of their names in a checkpoint, e.g. "
        "[*.phi_k.*, *.gates.*]; all others are frozen and have no gradient and no optimizer state. A pattern without "
        "a match is refused.",
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
    checkpoint_store: Changeable[str | None] = Field(
        default=None,
        description="s3://BUCKET/PATH to which every checkpoint is copied while it is saved, each rank its own files; "
        "`nsa checkpoint pull` brings one back. A copy that fails is reported and does not stop the run.",
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
        broken = rules.check_train(self.steps, self.warmup_steps, self.save_every, self.keep_every)
        return rules.enforce(self, chain(broken, rules.check_checkpoint_store(self.checkpoint_store)))

    @property
    def global_rows(self) -> int:
        """Global batch size: rows of one optimizer step, over all ranks and forward passes."""
        return self.batch_size * self.accumulate_grad_batches


class ParallelConfig(ConfigSection):
    """Data, tensor and context parallelism; unused with one rank."""

    data: Changeable[DataParallel] = Field(
        default="ddp",
        description="ddp: replicated weights; fsdp: sharded over all ranks; hsdp: sharded in groups of shard_ranks.",
    )
    shard_ranks: Changeable[Annotated[int, Field(ge=1), SettingUnit("ranks")] | None] = Field(
        default=None,
        description="Data-parallel ranks that share one copy of the weights (hsdp); null: those of one node.",
    )
    tp: Changeable[Annotated[int, Field(ge=1), SettingUnit("ranks")]] = Field(
        default=1,
        description="Tensor parallelism: ranks that divide the heads of every layer; must divide model.n_kv_groups.",
    )
    cp: Changeable[Annotated[int, Field(ge=1), SettingUnit("ranks")]] = Field(
        default=1, description="Context parallelism: ranks that divide the tokens of every row."
    )
    cp_split: Changeable[ContextSplit] = Field(
        default="zigzag",
        description="Tokens of a rank: zigzag gives each two pieces of the row, so that all attend over equally many "
        "keys; contiguous gives each one piece.",
    )
    timeout_s: Changeable[Seconds] = Field(
        default=600.0, description="Timeout of collectives: longest wait for other ranks before a run fails."
    )

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work on the same rows; the others are data-parallel to them."""
        return self.tp * self.cp


class _DataConfig(ConfigSection):
    """Dataset, tokenizer, packing and prefetching."""

    dataset: DatasetKind = Field(
        default="fineweb_edu",
        description="Streamed parquet, your own text, JSONL or parquet, prepared token shards, or synthetic tasks.",
    )
    path: Changeable[Text | None] = Field(
        default=None, description="Hub id, URL, folder or prepared folder; null is right for fineweb_edu and synthetic."
    )
    mixture: Changeable[
        Annotated[
            dict[Text, Positive] | None,
            WEIGHTS,
            ValueDescription("prepared folders with weights, e.g. {sets/web: 0.7, sets/code: 0.3}"),
        ]
    ] = Field(
        default=None,
        description="Prepared sets of one tokenizer in place of data.path, each with the weight of its rows: after any "
        "number of rows every set has its share to within one row.",
    )
    tokenizer: Changeable[Text] = Field(
        default="byte", description="byte, or the path of a tokenizers JSON file. A prepared set is used with its own."
    )
    held_out: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.001, description="Fraction of the documents held out for evaluation and never trained on."
    )
    packing: RowPacking = Field(
        default="stream", description="stream cuts documents at row ends; best_fit keeps them whole where they fit."
    )
    mask_document_ends: bool = Field(
        default=True,
        description="Leave out of the loss what follows a document's end in a row: the first token of another "
        "document, which attention cannot see. false: as versions without this setting did.",
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
        default="copy",
        description="Random tokens, a copy, a value to retrieve, far recall (two forms), or variable tracking.",
    )
    synthetic_on_fail: Changeable[bool] = Field(
        default=False,
        description="Train on synthetic data if the dataset fails; logged, recorded, and refused for long runs.",
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        return rules.enforce(self, rules.check_data(self.dataset, self.path, self.mixture))


class _TrackConfig(ConfigSection):
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
    """A resolved run. `nsa_train.config.load` builds one from files, environment and command line."""

    TOY: ClassVar[str] = "toy"

    profile: Changeable[Text | None] = Field(
        None,
        description="Hardware profile (configs/profiles/NAME.yaml, or a path); toy marks a config unfit for long runs.",
    )
    model: ModelConfig = ModelConfig()
    nsa: SparseAttentionConfig = SparseAttentionConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    kernels: KernelsConfig = KernelsConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: _DataConfig = _DataConfig()
    track: _TrackConfig = _TrackConfig()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def resolved(cls, values: Mapping[str, Any], origins: Mapping[str, str], notices: tuple[str, ...]) -> Self:
        config = cls.model_validate(values)
        config._origins = dict(origins)
        config._notices = notices
        return config

    @classmethod
    def of_saved(cls, values: Mapping[str, Any]) -> Self:
        """The settings that a run recorded; one that its version did not have gets the value it behaved by."""
        complete = dict(values)
        for key, value in VALUES_BEFORE.items():
            section, name = key.split(".")
            section_values = complete.get(section, {})
            if isinstance(section_values, Mapping):
                complete[section] = {name: value, **section_values}
        return cls.model_validate(complete)

    @property
    def attention(self) -> AttentionConfig:
        """Options that all attention layers share; `model.attention` and `model.rope_layers` say how they differ."""
        return rules.attention_of(self.model, self.nsa)

    @property
    def window(self) -> int:
        """Window of layers of kind `window`, in tokens."""
        return self.nsa.w if self.model.window is None else self.model.window

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        return rules.enforce(self, rules.check_run(self.attention, self.model.attention))

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes on how this config was resolved, e.g. retired names that were ignored."""
        return self._notices

    def value(self, key: str) -> Any:
        """The value of a dotted key such as `train.lr`."""
        if key not in settings():
            raise ConfigError(f"{key!r} is not a setting. `nsa config show FILE` lists them all.")
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def origin(self, key: str) -> str:
        """Origin of a value: file and line, profile, environment variable, command line, or default."""
        value = self.value(key)
        if key in self._origins:
            return self._origins[key]
        *path, name = key.split(".")
        section: ConfigSection = self
        for part in path:
            section = getattr(section, part)
        if key.startswith("nsa.") and name in PRESETS[self.nsa.preset]:
            return f"nsa.preset={self.nsa.preset}"
        is_set = name in section.model_fields_set
        return "code" if is_set and value != settings()[key].default else "default"

    def origins(self) -> dict[str, str]:
        return {key: self.origin(key) for key in settings()}


VALUES_BEFORE = {"nsa.kv": "per_branch", "data.mask_document_ends": False}
"""Behaviour of versions without these settings, where it is not the default."""

# Keys of earlier systems that old configs contain: accepted, ignored, and reported with their replacement.
RETIRED_KEYS = {
    "runtime.use_triton_sel": "the backend of each branch is chosen by kernels.selected and kernels.select",
    "runtime.sel_triton_min_L": "kernels.selected=auto chooses one backend for every length",
    "runtime.fa2_enabled": "flash-attn is in the backend flash, chosen by kernels.sliding and kernels.compressed",
    "runtime.fa2_min_len_win": "kernels.sliding=auto chooses one backend for every length",
    "runtime.fa2_min_len_cmp": "kernels.compressed=auto chooses one backend for every length",
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
    fields = dict(RunConfig.model_fields)
    for section, cls in sections().items():
        fields |= {f"{section}.{name}": field for name, field in cls.model_fields.items()}
    return types.MappingProxyType({key: field for key, field in fields.items() if key not in sections()})
