"""Generation in Transformers: our model beside Transformers' own Llama of the same size, and what our adapter costs.

    python -m tools.bench_generation decode --batches 1,8,32 --contexts 2k,8k,32k     tokens per second
    python -m tools.bench_generation first-token --batches 1,8 --contexts 2k,8k,32k   seconds until the first token
    python -m tools.bench_generation prefill --contexts 2k,8k                         forward with a cache / without
    python -m tools.bench_generation overhead --context 2k                            generate / a bare loop

The shape is the 125M one (768 wide, 12 layers, 12 heads, 2 key/value groups, fp32, random weights); `--layers` makes it
shallower, and a cell whose caches would not fit the memory is measured with fewer layers, which is printed. Models run
in turns, so that other load on the machine affects both; a figure is the median, a ratio that of neighbours in time.

decode fills the caches with random keys instead of running prompts: 32 prompts of 32k tokens would take hours, and the
time per token does not depend on what the keys are. Llama runs with the faster of its dynamic and static cache.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import Cache
from transformers.utils import logging

from nsa.bench.machine import available_bytes, describe_machine, interleave, pinned, ratio, spread
from nsa.core.branches import BranchStreams
from nsa.hf import NSAConfig, NSAForCausalLM
from nsa.hf.cache import cache_layers
from nsa.model.transformer import run_blocks
from nsa.token_counts import parse_lengths, spell

VOCABULARY = 32_000
MEMORY_SHARE = 0.6  # of the available memory, for the caches of both models
FILL_CHUNK = 4096  # tokens of keys that are drawn at once

Json = dict[str, Any]


def our_model(layers: int) -> NSAForCausalLM:
    torch.manual_seed(0)
    return NSAForCausalLM(NSAConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, pad_token_id=0)).eval()


def llama(layers: int) -> LlamaForCausalLM:
    """Build a Llama with as many layers, heads, groups and channels, and dense attention."""
    same = NSAConfig()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=same.hidden_size,
        intermediate_size=same.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=same.num_attention_heads,
        num_key_value_heads=same.num_key_value_heads,
        head_dim=same.head_dim,
        max_position_embeddings=1 << 20,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def our_cache(model: NSAForCausalLM, batch: int, context: int, room: int) -> Cache:
    """A cache that holds `context` random tokens per row."""
    cache, config = DynamicCache(config=model.config), model.config
    widths = (config.head_dim, config.v_head_dim or config.head_dim) * 3
    for layer, block in _layers(model, cache):
        layer.reserve(context + room)
        ours = layer.open(block.attention, batch, context)
        for size in _chunks(context):
            streams = [torch.randn(batch, size, config.num_key_value_heads, width) for width in widths]
            with torch.no_grad():
                ours.append(BranchStreams(*streams), None, block.attention.compress)
        layer.advance(context, None)
    return cache


def llama_cache(model: LlamaForCausalLM, kind: str, batch: int, context: int, room: int) -> Cache:
    config = model.config
    if kind == "static":
        cache: Cache = StaticCache(config=config, max_cache_len=context + room)
    else:
        cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = (batch, config.num_key_value_heads, context, config.head_dim)
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    return cache


def _chunks(total: int) -> Iterator[int]:
    for begin in range(0, total, FILL_CHUNK):
        yield min(FILL_CHUNK, total - begin)


class Continuation:
    """Each call generates `step` more tokens per row with the same cache."""

    def __init__(self, model: Any, cache: Cache, batch: int, context: int, step: int) -> None:
        self.model, self.cache, self.step = model, cache, step
        self.ids_BS = torch.randint(1, VOCABULARY, (batch, context + 1))

    def __call__(self) -> None:
        self.ids_BS = self.model.generate(
            self.ids_BS,
            attention_mask=torch.ones_like(self.ids_BS),
            past_key_values=self.cache,
            max_new_tokens=self.step,
            do_sample=False,
        )


def cache_bytes_per_layer(batch: int, context: int) -> int:
    """Return the bytes of both models' caches in fp32: ours has a sixteenth more, and Llama's dynamic cache is copied
    to grow."""
    config = NSAConfig()
    one = batch * context * config.num_key_value_heads * 2 * config.head_dim * 4
    return int(one * (1.1 + 2))


def decode(arguments: argparse.Namespace) -> Iterator[Json]:
    for context in arguments.contexts:
        for batch in arguments.batches:
            fits = int(available_bytes() * MEMORY_SHARE / cache_bytes_per_layer(batch, context))
            layers = min(arguments.layers, fits)
            if layers < 1:
                yield {"context": context, "batch": batch, "left_out": "the caches do not fit the memory"}
                continue
            yield decode_cell(batch, context, layers, arguments)


def decode_cell(batch: int, context: int, layers: int, arguments: argparse.Namespace) -> Json:
    ours, theirs = our_model(layers), llama(layers)
    room = arguments.tokens * (arguments.rounds + 1) + 1
    best: Json = {}
    for kind in arguments.llama_caches:
        subjects = {
            "nsa": Continuation(ours, our_cache(ours, batch, context, room), batch, context, arguments.tokens),
            "llama": Continuation(
                theirs, llama_cache(theirs, kind, batch, context, room), batch, context, arguments.tokens
            ),
        }
        for subject in subjects.values():
            subject()  # the first call allocates and prepares
        samples = interleave(
            subjects, budget_s=arguments.seconds, min_rounds=1, max_rounds=arguments.rounds, now=arguments.clock
        )
        cell = {
            "context": context,
            "batch": batch,
            "layers": layers,
            "llama_cache": kind,
            "nsa_tokens_per_s": batch * arguments.tokens / spread(samples["nsa"]).median,
            "llama_tokens_per_s": batch * arguments.tokens / spread(samples["llama"]).median,
            "ratio": ratio(samples["llama"], samples["nsa"]).median,
            "rounds": len(samples["nsa"]),
        }
        if not best or cell["llama_tokens_per_s"] > best["llama_tokens_per_s"]:
            best = cell
    return best


def first_token(arguments: argparse.Namespace) -> Iterator[Json]:
    """generate(max_new_tokens=1) on a whole prompt. A cell that would take longer than the budget is left out."""
    ours, theirs = our_model(arguments.layers), llama(arguments.layers)
    slowest_s = 0.0
    for context in arguments.contexts:
        for batch in arguments.batches:
            cell: Json = {"context": context, "batch": batch, "layers": arguments.layers}
            ids_BS = torch.randint(1, VOCABULARY, (batch, context))

            def run(model: Any, ids_BS: Tensor = ids_BS) -> Callable[[], object]:
                mask_BS = torch.ones_like(ids_BS)
                return lambda: model.generate(ids_BS, attention_mask=mask_BS, max_new_tokens=1, do_sample=False)

            if slowest_s > arguments.seconds:
                yield cell | {"left_out": f"a smaller cell took {slowest_s:.0f} s"}
                continue
            samples = interleave(
                {"nsa": run(ours), "llama": run(theirs)},
                budget_s=arguments.seconds,
                max_rounds=arguments.rounds,
                now=arguments.clock,
            )
            slowest_s = sum(max(samples[name]) for name in samples)
            yield cell | {
                "nsa_s": spread(samples["nsa"]).median,
                "llama_s": spread(samples["llama"]).median,
                "ratio": ratio(samples["llama"], samples["nsa"]).median,
                "rounds": len(samples["nsa"]),
            }
        slowest_s = 0.0 if slowest_s <= arguments.seconds else slowest_s


@torch.no_grad()
def prefill(arguments: argparse.Namespace) -> Iterator[Json]:
    """The forward pass of `generate` over a prompt, beside the forward pass of training on the same blocks."""
    model = our_model(arguments.layers)
    blocks: list[Any] = list(model.model.layers)
    for context in arguments.contexts:
        ids_BS = torch.randint(1, VOCABULARY, (1, context))

        def training(ids_BS: Tensor = ids_BS) -> Tensor:
            x_BSD = run_blocks(model.model.embed_tokens(ids_BS), blocks, [None] * len(blocks))
            return model.lm_head(model.model.norm(x_BSD)[:, -1:])

        def cached(ids_BS: Tensor = ids_BS) -> object:
            mask_BS = torch.ones_like(ids_BS)
            return model(ids_BS, attention_mask=mask_BS, use_cache=True, logits_to_keep=1)

        subjects: dict[str, Callable[[], object]] = {"training": training, "prefill": cached}
        for subject in subjects.values():
            subject()
        samples = interleave(
            subjects, budget_s=arguments.seconds, min_rounds=2, max_rounds=arguments.rounds, now=arguments.clock
        )
        yield {
            "context": context,
            "layers": arguments.layers,
            "training_s": spread(samples["training"]).median,
            "prefill_s": spread(samples["prefill"]).median,
            "speed_of_training": ratio(samples["training"], samples["prefill"]).median,
            "rounds": len(samples["training"]),
        }


@torch.no_grad()
def overhead(arguments: argparse.Namespace) -> Iterator[Json]:
    """`generate` beside a loop of forward passes over the same blocks and caches."""
    model = our_model(arguments.layers)
    blocks: list[Any] = list(model.model.layers)
    context, tokens = arguments.context, arguments.tokens
    room = tokens * (arguments.rounds + 1) + 1
    generated = Continuation(model, our_cache(model, 1, context, room), 1, context, tokens)
    caches = [layer.open(block.attention, 1, 1) for layer, block in _layers(model, our_cache(model, 1, context, room))]
    token_B1 = torch.ones(1, 1, dtype=torch.int64)

    def bare() -> None:
        nonlocal token_B1
        for _ in range(tokens):
            x_BSD = run_blocks(model.model.embed_tokens(token_B1), blocks, caches)
            token_B1 = model.lm_head(model.model.norm(x_BSD)).argmax(-1)

    subjects: dict[str, Callable[[], object]] = {"generate": generated, "bare": bare}
    for subject in subjects.values():
        subject()
    samples = interleave(
        subjects, budget_s=arguments.seconds, min_rounds=2, max_rounds=arguments.rounds, now=arguments.clock
    )
    per_token = {name: spread(samples[name]).median / tokens * 1e3 for name in samples}
    yield {
        "context": context,
        "layers": arguments.layers,
        "generate_ms": per_token["generate"],
        "bare_ms": per_token["bare"],
        "ratio": ratio(samples["generate"], samples["bare"]).median,
        "rounds": len(samples["bare"]),
    }


def _layers(model: NSAForCausalLM, cache: Cache) -> Iterator[tuple[Any, Any]]:
    return zip(cache_layers(cache, len(model.model.layers)), model.model.layers, strict=True)


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], Iterator[Json]]] = {
    "decode": decode,
    "first-token": first_token,
    "prefill": prefill,
    "overhead": overhead,
}


def spelled(cell: Json) -> str:
    parts = []
    for name, value in cell.items():
        text = spell(value) if name == "context" else f"{value:.4g}" if isinstance(value, float) else str(value)
        parts.append(f"{name} {text}")
    return ", ".join(parts)


def main(words: list[str] | None = None) -> list[Json]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--contexts", type=parse_lengths, default=parse_lengths("2k,8k,32k"))
    parser.add_argument("--context", type=lambda text: parse_lengths(text)[0], default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16, help="generated per call and row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120.0, help="budget of a cell; one round is always run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        help="count processor seconds, on a busy machine with one thread",
    )
    parser.add_argument("--llama-caches", type=lambda text: text.split(","), default=["dynamic", "static"])
    parser.add_argument("--json", type=Path, help="write the figures and the machine there")
    arguments = parser.parse_args(words)
    logging.set_verbosity_error()
    cells = []
    with pinned(arguments.threads):
        for cell in MEASUREMENTS[arguments.measurement](arguments):
            cells.append(cell)
            print(spelled(cell), flush=True)
    if arguments.json:
        record = {"measurement": arguments.measurement, "machine": describe_machine(), "cells": cells}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return cells


if __name__ == "__main__":
    main(sys.argv[1:])
