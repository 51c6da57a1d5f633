"""Convert a dense model of Transformers to sparse attention, and look at what it reads.

pip install 'nsa-train[data,hf]'

    python convert_dense.py                       a tiny Llama, trained here for 60 steps: half a minute of one core
    python convert_dense.py STEPS
    python convert_dense.py my-llama converted    your model: Llama, Qwen, Mistral, OLMo, SmolLM3 or Phi-3
"""

import sys
import tempfile
from pathlib import Path

import pyarrow.parquet
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

from nsa.core.probe import probing
from nsa.core.selection_quality import SelectionProbe
from nsa_train.convert.dense.conversion_plan import ConversionOptions
from nsa_train.convert.dense.convert_folder import convert_folder
from nsa_train.shipped import CORPUS

LENGTH = 512


def text_rows() -> torch.Tensor:
    """The shipped corpus as rows of bytes: [rows, LENGTH]."""
    documents = pyarrow.parquet.read_table(CORPUS, columns=["text"])["text"].to_pylist()
    data = torch.frombuffer(bytearray("\n\n".join(documents).encode()), dtype=torch.uint8)
    return data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)


def train_tiny_llama(folder: Path, rows: torch.Tensor, steps: int) -> None:
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=257, num_key_value_heads=2, head_dim=32, max_position_embeddings=LENGTH, **sizes)
    config.eos_token_id = config.bos_token_id = 256
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        tokens = rows[torch.randint(len(rows) - 8, (4,))].long()  # the last rows are not trained on
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"Llama, step {step}: loss {loss.item():.3f}")
    model.save_pretrained(folder)


@torch.inference_mode()
def compare(dense_folder: Path, sparse_folder: Path, tokens: torch.Tensor, covered: int) -> None:
    dense = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.float32).eval()
    sparse = AutoModelForCausalLM.from_pretrained(sparse_folder, dtype=torch.float32).eval()
    losses = [model(input_ids=tokens, labels=tokens, use_cache=False).loss.item() for model in (dense, sparse)]
    short = tokens[:, :covered]
    difference = (dense(input_ids=short).logits - sparse(input_ids=short).logits).abs().max()
    print(f"largest difference of logits up to {covered} tokens, which a query reads whole: {difference:.1e}")
    print(f"loss on {tokens.shape[1]} held-out tokens: dense {losses[0]:.4f}, sparse and untrained {losses[1]:.4f}")
    # One query in 16 is compared with dense attention over the same keys.
    with probing(sparse, lambda: SelectionProbe(every=16)) as probes:
        sparse(input_ids=tokens, use_cache=False)
    for name, probe in probes.items():
        if not (queries := probe.counts.queries):
            continue
        assert probe.chosen_BQGN is not None
        last = [sorted(set(blocks.tolist()) - {-1}) for blocks in probe.chosen_BQGN[0, -1]]
        caught, window = probe.counts.mass_caught / queries, probe.counts.window_mass / queries
        print(
            f"{name}: of dense attention's mass {window:.0%} is in the window; of that before it {caught:.0%} is in the"
        )
        print(f"    chosen blocks. The last token reads {last[0]} (first group of heads) and {last[-1]} (last group)")


def main(dense: Path, sparse: Path, options: ConversionOptions, tokens: torch.Tensor) -> None:
    logging.disable_progress_bar()
    converted = convert_folder(dense, sparse, options)  # the command: nsa convert DENSE SPARSE
    print(f"{converted.architecture}: {converted.parameters:,} weights kept, {converted.new_parameters} new")
    for kind, reads in converted.reads.items():
        print(f"{reads.layers} layers {kind}: the last token reads {reads.keys} keys and scores {reads.scored}")
    compare(dense, sparse, tokens, min(reads.covered or tokens.shape[1] for reads in converted.reads.values()))


if __name__ == "__main__":
    rows = text_rows()
    if len(sys.argv) == 3:  # block sizes: the paper's; tokens: better those of your tokenizer and text
        main(Path(sys.argv[1]), Path(sys.argv[2]), ConversionOptions(), rows[-8:].long().view(1, -1))
    else:
        steps = int(sys.argv[1]) if sys.argv[1:] else 60
        with tempfile.TemporaryDirectory() as folder:
            train_tiny_llama(Path(folder, "llama"), rows, steps)
            blocks = ConversionOptions(l=16, d=8, l_sel=32, n_sel=4, w=64)
            main(Path(folder, "llama"), Path(folder, "sparse"), blocks, rows[-1:].long())
