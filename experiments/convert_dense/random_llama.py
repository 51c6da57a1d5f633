"""Write a Llama of Transformers with random weights and a given tokenizer.

python -m experiments.convert_dense.random_llama OUT bpe.json
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.convert_dense.run import MODEL


def main() -> None:
    out, tokenizer = map(Path, sys.argv[1:])
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(out)
    shutil.copy(tokenizer, out / "tokenizer.json")
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}), encoding="utf-8")


if __name__ == "__main__":
    main()
