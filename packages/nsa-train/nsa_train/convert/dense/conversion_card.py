"""README.md of a converted folder: what it was made from, how far it equals that, how to load and train it."""

from collections.abc import Iterator, Mapping

from nsa.hf.configuration import NSAConfig
from nsa.options import AttentionKind
from nsa_train.convert.dense.conversion_plan import LayerReads, covered_tokens
from nsa_train.convert.dense.conversion_record import CONVERSION, ConversionRecord
from nsa_train.convert.model_card import card_table, how_to_load


def conversion_card(
    record: ConversionRecord,
    config: NSAConfig,
    reads: Mapping[AttentionKind, LayerReads],
    *,
    parameters: int,
    has_tokenizer: bool,
) -> str:
    return "\n".join(_lines(record, config, reads, parameters, has_tokenizer)) + "\n"


def _lines(
    record: ConversionRecord,
    config: NSAConfig,
    reads: Mapping[AttentionKind, LayerReads],
    parameters: int,
    has_tokenizer: bool,
) -> Iterator[str]:
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation", "license: unknown")
    yield from ("tags:", "- native-sparse-attention", "---", "")
    yield from (f"# {record.architecture}, converted to sparse attention", "")
    yield f"Converted by `nsa convert` (nsa-train {record.version}) and not trained since. {_equality(reads)}"
    yield (
        f"`{CONVERSION}` holds the source's config.json and the hashes of its tensors: `nsa convert FOLDER OUT "
        f"--to-dense` writes the source's format back. The licence is that of the source."
    )
    yield from ("", "## Load", "", *how_to_load(remote_code=False), "## Model", "")
    yield from card_table(
        {
            "parameters": f"{parameters:,}, {record.dtype}",
            "layers, width, heads, key/value groups": f"{config.num_hidden_layers}, {config.hidden_size}, "
            f"{config.num_attention_heads}, {config.num_key_value_heads}",
            "blocks l, d, l_sel, n_sel, w": f"{config.l}, {config.d}, {config.l_sel}, {config.n_sel}, {config.w}",
            "context of the source": f"{config.max_position_embeddings:,} tokens",
            "vocabulary": f"{config.vocab_size:,} ids, " + ("with its tokenizer" if has_tokenizer else "no tokenizer"),
        }
    )
    yield from ("", "## Layers", "", "| kind | layers | keys read at the end of the context | compressed keys scored |")
    yield "|---|---|---|---|"
    for kind, each in reads.items():
        yield f"| {kind} | {each.layers} | {each.keys:,} | {each.scored:,} |"


def _equality(reads: Mapping[AttentionKind, LayerReads]) -> str:
    if (covered := covered_tokens(reads)) is None:
        return "It computes what the source computes."
    return (
        f"Up to {covered:,} tokens it computes what the source computes; beyond, a token reads the blocks it selects, "
        f"and training is needed for long texts."
    )
