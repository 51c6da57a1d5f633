"""training_record.json and README.md of an exported folder: how the model was trained, without paths of the machine.

Taken from the run's own records at the first export and kept through import, so that a second export writes the same.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from nsa import __version__
from nsa.errors import CheckpointError, ConfigError
from nsa.hf.configuration import NSAConfig
from nsa_train import names
from nsa_train.checkpoint.trained_model import TrainedModel
from nsa_train.config.layer import flatten
from nsa_train.config.schema import RunConfig
from nsa_train.config.setting_types import plain
from nsa_train.convert.folder_files import require_fields
from nsa_train.data.tokenizer import ByteTokenizer, Tokenizer
from nsa_train.record.evaluations import read_evaluations
from nsa_train.watch import run_reader
from nsa_train.watch.view.evaluation_tables import evaluation_summary

TRAINING_RECORD = "training_record.json"
_FORMAT = 1
_PRIVATE_SECTIONS = ("kernels", "parallel", "track")
_PRIVATE_SETTINGS = {
    "train": ("out_dir", "checkpoint_key_file"),
    "data": ("tokenizer", "cache_dir"),
    "runtime": ("kernel_cache", "device", "threads"),
}
_LONGEST_TEXT = 2000
_NOT_RECORDED = "not recorded"

_LOAD = """\
```python
{head}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER"{trust})
tokenizer = AutoTokenizer.from_pretrained("PATH_OF_THIS_FOLDER"{trust})
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=100)[0]))
```
"""


@dataclass(frozen=True)
class TrainingRecord:
    step: int
    """Optimizer steps."""
    tokens: int
    """Tokens that these steps trained on."""
    loss: float | None
    """Training loss in nats per token, of the last progress record up to the step."""
    held_out_loss: float | None
    held_out_step: int | None
    """Step of the last evaluation up to the step."""
    data: str
    version: str
    """Version of nsa-train at the time of the export."""
    license: str | None
    settings: Mapping[str, Any]
    """Settings of the run by section, without private ones."""
    evaluations: Mapping[str, str] = field(default_factory=dict)
    """Results of `nsa eval` for this step: name and figure."""

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2, sort_keys=True, allow_nan=False) + "\n"

    def as_dict(self) -> dict[str, Any]:
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: object) -> Self:
        """Read a record from JSON that may come from anyone; raises CheckpointError."""
        expected = {
            "format": int, "step": int, "tokens": int, "loss": (float, int, None), "held_out_step": (int, None),
            "held_out_loss": (float, int, None), "data": str, "version": str, "license": (str, None), "settings": dict,
            "evaluations": dict,
        }  # fmt: skip
        require_fields(values, expected, where)
        for key, value in values.items():
            if isinstance(value, str) and (len(value) > _LONGEST_TEXT or not value.isprintable()):
                raise CheckpointError(f"{where} has an unreadable {key}: {value!r:.80}.")
            if key != "format" and isinstance(value, int | float) and not 0 <= value < 2**62:
                raise CheckpointError(f"{where} has {key}={value!r:.80}: it must be a number of 0 or more.")
        if values["format"] != _FORMAT:
            raise CheckpointError(f"{where} has format {values['format']}, this version reads {_FORMAT}.")
        for name, figure in values["evaluations"].items():
            if not (type(figure) is str and name.isprintable() and figure.isprintable() and len(name + figure) < 1000):
                raise CheckpointError(f"{where} has an unreadable evaluation: {name!r:.80}={figure!r:.80}.")
        if values["license"] is not None:
            require_license(values["license"])
        return cls(**{key: value for key, value in values.items() if key != "format"})


def require_license(name: str) -> str:
    """A licence's identifier, e.g. apache-2.0: it is written into the head of the model card."""
    if not (name.isascii() and 0 < len(name) <= 60 and name.replace("-", "").replace(".", "").isalnum()):
        raise ConfigError(
            f"the licence is {name!r:.80}: it must be an identifier of letters, digits, '-' and '.'. Use e.g. "
            f"apache-2.0."
        )
    return name


def record_of(trained: TrainedModel, license_name: str | None) -> TrainingRecord:
    """The record of a checkpoint: the one it was imported with, or one made from the run folder around it."""
    if (values := trained.record.more.get(TRAINING_RECORD)) is not None:
        record = TrainingRecord.parse(values if isinstance(values, dict) else {}, trained.path / names.STATE)
        return record if license_name is None else TrainingRecord(**{**asdict(record), "license": license_name})
    config, step = trained.config, trained.record.step
    train = config.train
    skipped = sum(end - first for first, end in trained.record.skipped_batches)
    loss, held_out, held_out_step = _losses(trained.path, step)
    return TrainingRecord(
        step=step,
        tokens=max(0, step - skipped) * train.global_rows * train.seq_len,
        loss=loss,
        held_out_loss=held_out,
        held_out_step=held_out_step,
        data=_data(config),
        version=__version__,
        license=license_name,
        settings=_public_settings(config),
        evaluations=_evaluations(trained.path, step),
    )


def _evaluations(checkpoint: Path, step: int) -> dict[str, str]:
    evaluations = [each for each in read_evaluations(checkpoint.parent.parent) if each.step == step]
    return evaluation_summary(evaluations[0]) if evaluations else {}


def _losses(checkpoint: Path, step: int) -> tuple[float | None, float | None, int | None]:
    """Training loss, held-out loss and its step, from the run folder; None where they are not recorded."""
    try:
        run = run_reader.load(checkpoint.parent.parent)
    except ConfigError:  # a checkpoint outside a run folder
        return None, None, None
    lead = run.lead
    recorded = zip(lead.counted("loss"), lead.counted("step"), strict=True)
    losses = [loss for loss, at in recorded if at <= step and math.isfinite(loss)]
    scored = [each for each in run.counted_evaluations() if each.step <= step and math.isfinite(each.val_loss)]
    last = scored[-1] if scored else None
    return losses[-1] if losses else None, last and last.val_loss, last and last.step


def _data(config: RunConfig) -> str:
    data = config.data
    if data.dataset == "synthetic":
        return f"synthetic rows ({data.synthetic_task}), no text"
    paths = [data.path] if data.path else list(data.mixture or ())
    return f"{data.dataset}: {', '.join(map(_public_path, paths))}" if paths else data.dataset


def _public_path(path: str) -> str:
    """A hub id or address without options; of a local path only the last part."""
    parts = urlsplit(path)
    if parts.scheme in ("http", "https", "s3", "hf"):
        return f"{parts.scheme}://{parts.hostname}{parts.path}"
    return path if path.count("/") == 1 and not path.startswith((".", "~", "/")) else Path(path).name


def _public_settings(config: RunConfig) -> dict[str, Any]:
    settings = config.model_dump(mode="json", exclude={"profile", *_PRIVATE_SECTIONS})
    for section, private in _PRIVATE_SETTINGS.items():
        for name in private:
            del settings[section][name]
    if config.data.path is not None:
        settings["data"]["path"] = _public_path(config.data.path)
    if config.data.mixture is not None:
        settings["data"]["mixture"] = {_public_path(path): weight for path, weight in config.data.mixture.items()}
    return settings


# The model card.


def model_card(
    record: TrainingRecord,
    config: NSAConfig,
    *,
    parameters: int,
    dtype: str,
    tokenizer: Tokenizer | None,
    remote_code: bool,
) -> Iterator[str]:
    """The lines of README.md, for people and for the Hub."""
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation")
    yield f"license: {record.license or 'unknown'}"
    yield from ("tags:", "- native-sparse-attention", "---", "", "# Language model with Native Sparse Attention", "")
    yield (
        f"A causal language model of {parameters:,} parameters whose attention is Native Sparse Attention "
        f"(arXiv 2502.11089): compressed, selected and sliding-window attention, mixed by learned gates. Trained and "
        f"exported with nsa-train {record.version}."
    )
    yield from ("", "## Load", "", *how_to_load(remote_code), "## Training", "")
    yield from card_table(
        {
            "data": record.data,
            "steps": f"{record.step:,}",
            "tokens": f"{record.tokens:,}",
            "training loss, last record": _loss(record.loss),
            "held-out loss": _loss(record.held_out_loss, record.held_out_step),
            "licence": record.license or "not stated: ask whoever gave you this model",
        }
    )
    if record.evaluations:
        yield from ("", "## Evaluation", "", *card_table(dict(record.evaluations)))
    yield from ("", "## Model", "")
    yield from card_table(
        {
            "layers, width, heads, key/value groups": f"{config.num_hidden_layers}, {config.hidden_size}, "
            f"{config.num_attention_heads}, {config.num_key_value_heads}",
            "blocks l, d, l_sel, n_sel, w": f"{config.l}, {config.d}, {config.l_sel}, {config.n_sel}, {config.w}",
            "context of training": f"{config.max_position_embeddings:,} tokens",
            "vocabulary": f"{config.vocab_size:,} ids, {_kind(tokenizer)}",
            "weights": f"{dtype}, safetensors",
        }
    )
    yield from ("", "## Settings of the run", "")
    yield from card_table({key: plain(value) for key, value in sorted(flatten(record.settings).items())})


def how_to_load(remote_code: bool) -> Iterator[str]:
    if remote_code:
        yield (
            "The folder holds its own modelling code (PyTorch only), which `trust_remote_code=True` runs: read it "
            "first. Where `nsa-train` is installed, `import nsa.hf` first and leave the argument out: its compiled "
            "kernels are faster."
        )
        yield from ("", _LOAD.format(head="", trust=", trust_remote_code=True"))
    else:
        yield "Needs `pip install 'nsa-train[hf]'`; importing `nsa.hf` registers the model with Transformers."
        yield from ("", _LOAD.format(head="import nsa.hf  # registers the model\n", trust=""))


def card_table(rows: dict[str, str]) -> Iterator[str]:
    yield from ("| | |", "|---|---|")
    for name, value in rows.items():
        yield f"| {_cell(name)} | {_cell(value)} |"


def _cell(text: str) -> str:
    """Text that may come from anyone, as one cell: no control character, no markup that a page would execute."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    for special, entity in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "\\|"),
        ("[", "\\["),
        ("]", "\\]"),
        ("`", "\\`"),
    ):
        shown = shown.replace(special, entity)
    return shown


def _loss(value: float | None, step: int | None = None) -> str:
    if value is None:
        return _NOT_RECORDED
    return f"{value:.4f} nats per token" + ("" if step is None else f" at step {step:,}")


def _kind(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "without a tokenizer"
    return "UTF-8 bytes" if isinstance(tokenizer, ByteTokenizer) else names.TOKENIZER
