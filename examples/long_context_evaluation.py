"""Long-context evaluation: how often a model finds a sentence far back, by length and depth, and whether it read it.

pip install 'nsa-train[data,hf]'

    python long_context_evaluation.py                a tiny model with random weights: chance
    python long_context_evaluation.py MODEL 4096 16384 65536      a run folder, or a folder of `nsa export hf`
"""

import sys
import tempfile
import time

import torch

from nsa import Geometry
from nsa.hf import NSAConfig, NSAForCausalLM
from nsa_train.infer import LoadedModel, load_model
from nsa_train.infer.evaluation.run import EvaluationRequest, evaluate_model


def tiny_model(folder: str) -> LoadedModel:
    """Random weights over bytes; `load_model` reads it as any exported folder."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    blocks = dict(l=16, d=8, l_sel=32, n_sel=4, w=64)
    config = NSAConfig(vocab_size=257, eos_token_id=256, max_position_embeddings=1024, **sizes, **blocks)
    NSAForCausalLM(config).save_pretrained(folder)
    return load_model(folder, tokenizer="byte")


def evaluate(loaded: LoadedModel, lengths: list[int], examples: int) -> None:
    config = loaded.model.config
    geometry = Geometry(config.l, config.d, config.l_sel, config.n_sel, config.w)
    print(f"{loaded.source}: {loaded.model.num_parameters():,} parameters, trained on rows of {loaded.trained_length}")
    for task in ("needle", "associative_recall"):
        print(f"\n{task}\n length  depth  accuracy    95 %        chance   read it   keys read   seconds")
        for length in lengths:
            for depth in (0.0, 0.5, 1.0):
                # hay: the text around the answer; "built-in", or a file of text like that of the training
                request = EvaluationRequest([task], lengths=[length], depths=[depth], limit=examples, hay="built-in")
                began = time.perf_counter()
                (cell,) = evaluate_model(loaded, request)[task]["cells"]
                seconds = (time.perf_counter() - began) / examples
                low, high = cell["accuracy_interval"]
                read = cell.get("needle_hit")
                print(f"{length:7,}  {depth:5.0%}  {cell['accuracy']:8.0%}  {low:4.0%} to {high:4.0%}", end="")
                print(f"  {cell['chance']:7.0%}  {'–' if read is None else f'{read:.0%}':>8}", end="")
                print(f"  {geometry.reads(length):9,}  {seconds:8.2f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        loaded = load_model(sys.argv[1])
        evaluate(loaded, [int(word) for word in sys.argv[2:]] or [loaded.trained_length], examples=20)
    else:
        with tempfile.TemporaryDirectory() as folder:
            evaluate(tiny_model(folder), [1024, 4096], examples=4)
    print("\naccuracy: the right answer is the likeliest of the candidates. read it: a layer's selection for the last")
    print("token of the prompt holds the sentence with the answer; its window and compressed blocks may hold it too.")
