"""README.md of an exported folder: a model card filled from the training record, for people and for the Hub."""

from collections.abc import Iterator

from nsa.hf.configuration import NSAConfig
from nsa_train import names
from nsa_train.config.layer import flatten
from nsa_train.config.setting_types import plain
from nsa_train.convert.training_record import TrainingRecord
from nsa_train.data.tokenizer import ByteTokenizer, Tokenizer

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


def model_card(
    record: TrainingRecord,
    config: NSAConfig,
    *,
    parameters: int,
    dtype: str,
    tokenizer: Tokenizer | None,
    remote_code: bool,
) -> str:
    return "\n".join(_lines(record, config, parameters, dtype, tokenizer, remote_code)) + "\n"


def _lines(
    record: TrainingRecord,
    config: NSAConfig,
    parameters: int,
    dtype: str,
    tokenizer: Tokenizer | None,
    remote_code: bool,
) -> Iterator[str]:
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
