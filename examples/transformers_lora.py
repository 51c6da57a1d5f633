"""An NSA model in Transformers: save, load, generate, and fine-tune with LoRA.

pip install 'nsa-attention[hf]' peft

    python transformers_lora.py                 a tiny model with random weights learns one sentence: seconds
    python transformers_lora.py my-model        a folder that `nsa export hf RUN my-model` wrote
"""

import pathlib
import sys
import tempfile

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

import nsa.hf  # registers the model with Transformers, which has no plugins

SENTENCE = "Sparse attention reads a few blocks of the text, and the model learns which. "


def write_tiny_model(folder: str) -> None:
    """A model over bytes, so that it needs no tokenizer."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    blocks = dict(l=16, d=8, l_sel=32, n_sel=4, w=64)  # for short texts; leave out for the paper's
    ids = dict(vocab_size=257, eos_token_id=256, pad_token_id=256)
    config = nsa.hf.NSAConfig(initializer_range=0.1, **ids, **sizes, **blocks)
    nsa.hf.NSAForCausalLM(config).save_pretrained(folder)


class Codec:
    """Text to token ids and back: the tokenizer of the folder, or bytes."""

    def __init__(self, folder: str) -> None:
        has_tokenizer = (pathlib.Path(folder) / "tokenizer.json").exists()
        self.tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None

    def encode(self, text: str) -> torch.Tensor:
        ids = list(text.encode()) if self.tokenizer is None else self.tokenizer(text)["input_ids"]
        return torch.tensor([ids])

    def decode(self, ids: torch.Tensor) -> str:
        if self.tokenizer is not None:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        return bytes(number for number in ids.tolist() if number < 256).decode("utf-8", "replace")


def sample(model: torch.nn.Module, codec: Codec) -> str:
    prompt = codec.encode("Sparse ")
    ids = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
    return repr(codec.decode(ids[0]))


def main(folder: str) -> None:
    logging.disable_progress_bar()
    model, codec = AutoModelForCausalLM.from_pretrained(folder), Codec(folder)
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters")
    print("before:", sample(model, codec))

    # All projections: w_q, w_k, w_v, w_out, the gates of the branches, and the feed-forward.
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=16, lora_alpha=32)
    adapted = peft.get_peft_model(model, settings)
    trained, total = adapted.get_nb_trainable_parameters()
    print(f"LoRA trains {trained:,} of {total:,}")
    ids = codec.encode(SENTENCE * 4)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=3e-3)
    for step in range(61):
        loss = adapted(input_ids=ids, labels=ids).loss  # the model shifts the labels
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step:2d}   loss {loss.item():.3f}")

    adapted.eval()
    adapted.save_pretrained(f"{folder}/adapter")
    merged = adapted.merge_and_unload()
    print("after: ", sample(merged, codec))
    size = (pathlib.Path(folder) / "adapter/adapter_model.safetensors").stat().st_size / 1e6
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), f"{folder}/adapter").eval()
    with torch.no_grad():
        difference = (again(ids).logits - merged(ids).logits).abs().max()
    print(f"the adapter has {size:.2f} MB; loaded again, its logits differ from the merged model's by {difference:.0e}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_model(folder)
            main(folder)
