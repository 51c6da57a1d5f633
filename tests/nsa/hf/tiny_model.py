"""The small model that the tests of `nsa.hf` share: two layers, blocks small enough that short prompts fill them."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nsa.hf import NSAConfig, NSAForCausalLM

SIZES: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    v_head_dim=12,
    l=8,
    d=4,
    l_sel=16,
    n_sel=4,
    w=24,
    max_position_embeddings=512,
    pad_token_id=0,
)


def tiny_config(**changes: Any) -> NSAConfig:
    return NSAConfig(**SIZES | changes)


def tiny_model(seed: int = 0, **changes: Any) -> NSAForCausalLM:
    """Weights far from zero, so that every branch and every position matters for the next token."""
    model = NSAForCausalLM(tiny_config(**changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3, generator=generator)
    return model


def prompts(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of these lengths in one batch, and their attention mask."""
    longest = max(lengths)
    ids, mask = torch.zeros(len(lengths), longest, dtype=torch.int64), torch.zeros(len(lengths), longest).long()
    for row, n in enumerate(lengths):
        at = slice(longest - n, None) if side == "left" else slice(0, n)
        ids[row, at], mask[row, at] = prompts(1, n, seed=row)[0], 1
    return ids, mask


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte; 256 ends a text."""
    alphabet = {char: byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
