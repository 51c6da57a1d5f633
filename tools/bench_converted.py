"""Speed of a converted model beside its dense self: prefill of a prompt and decoding after it, in one process.

    python -m tools.bench_converted SPARSE --lengths 8k,16k,32k,64k
    python -m tools.bench_converted SPARSE --random --layers 4 --dtype bf16 --json speed.json

The dense model has the same weights and the kinds of layers of the source (`conversion.json`), or `dense` for every
sparse layer of a folder without that file; both share one set of tensors. Models run in turns, so that other load on
the machine affects both alike; a time is the median, a ratio (dense / sparse) that of neighbours in time. Prompts are
random tokens, read a chunk at a time as by `nsa generate`. Decoding continues the cache of the last prompt.
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
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import logging

from nsa.bench.machine import describe_machine, interleave, pinned, ratio, spread
from nsa.errors import ConfigError
from nsa.hf.cache import cache_layers
from nsa.hf.modeling import NSAForCausalLM
from nsa.options import AttentionKind
from nsa.token_counts import parse_lengths, spell
from nsa_train.convert.dense.convert_folder import CONVERSION, ConversionRecord
from nsa_train.convert.dense.source_folder import parse_source_config
from nsa_train.convert.export_folder import DTYPES
from nsa_train.convert.import_folder import read_config
from nsa_train.infer.evaluation.layer_harm import with_layer_kinds
from nsa_train.infer.load_model import LoadedModel, load_model

Json = dict[str, Any]
MODELS = ("sparse", "dense")


def sparse_model(folder: Path, *, random: bool, layers: int | None, dtype: torch.dtype | None) -> NSAForCausalLM:
    """The converted model, with random weights of its shape if asked for, cut to its first layers."""
    if not random:
        if layers is not None:
            raise ConfigError(f"--layers is {layers} without --random: a loaded model keeps its layers. Add --random.")
        return load_model(folder, device="cpu", dtype=dtype, needs_text=False).model
    config = read_config(folder)
    kinds = config.layer_kinds()[:layers]
    config.attention, config.num_hidden_layers = list(kinds), len(kinds)
    torch.manual_seed(0)
    return NSAForCausalLM(config).to(dtype or torch.float32).eval()


def dense_kinds(folder: Path, model: NSAForCausalLM) -> list[AttentionKind]:
    """The kinds of layers that the source has, if the folder says so and the source is dense."""
    config, kinds = model.config, model.config.layer_kinds()
    if (folder / CONVERSION).exists():
        record, rows = ConversionRecord.read(folder), config.num_attention_heads * config.head_dim
        source = parse_source_config(record.config, folder / CONVERSION, lambda: rows)
        if not source.is_sparse:
            return list(source.kinds[: len(kinds)])
    return ["window" if kind == "window" else "dense" for kind in kinds]


class PromptRun:
    """One model: each call of `prefill` reads the prompt into a new cache, `decode` continues the last one."""

    def __init__(self, model: NSAForCausalLM, prompt_BS: Tensor, chunk: int, tokens: int, room: int) -> None:
        self.model, self.prompt_BS, self.chunk, self.tokens, self.room = model, prompt_BS, chunk, tokens, room
        self.cache: Cache | None = None

    @torch.inference_mode()
    def prefill(self) -> None:
        self.cache = None  # the memory of the last one
        cache: Cache = DynamicCache(config=self.model.config)
        for layer in cache_layers(cache, self.model.config.num_hidden_layers):
            layer.reserve(self.prompt_BS.shape[1] + self.room)
        for part_BS in self.prompt_BS.split(self.chunk, 1):
            self._next = self._forward(part_BS, cache)
        self.cache = cache

    @torch.inference_mode()
    def decode(self) -> None:
        assert self.cache is not None
        for _ in range(self.tokens):
            self._next = self._forward(self._next, self.cache)

    def _forward(self, ids_BS: Tensor, cache: Cache) -> Tensor:
        output = self.model(ids_BS, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token_B1: Tensor = output.logits[:, -1:].argmax(-1)
        return token_B1


def measure(sparse: NSAForCausalLM, dense: NSAForCausalLM, length: int, arguments: argparse.Namespace) -> Json:
    """Seconds of prefill and milliseconds per decoded token of both at one length."""
    prompt_BS = torch.randint(0, sparse.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
    room = arguments.tokens * (arguments.rounds + 1)
    runs = {
        name: PromptRun(model, prompt_BS, arguments.chunk, arguments.tokens, room)
        for name, model in zip(MODELS, (sparse, dense), strict=True)
    }

    def interleaved(calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        return interleave(calls, budget_s=arguments.seconds, max_rounds=arguments.rounds, now=arguments.clock)

    prefill = interleaved({name: run.prefill for name, run in runs.items()})
    for run in runs.values():
        run.decode()  # the first call prepares the decoder
    decode = interleaved({name: run.decode for name, run in runs.items()})
    per_token = {name: 1e3 * spread(samples).median / arguments.tokens for name, samples in decode.items()}
    return {
        "length": length,
        **{f"{name}_prefill_s": spread(samples).median for name, samples in prefill.items()},
        "prefill_ratio": ratio(prefill["dense"], prefill["sparse"]).median,
        **{f"{name}_decode_ms": per_token[name] for name in MODELS},
        "decode_ratio": ratio(decode["dense"], decode["sparse"]).median,
        "prefill_rounds": len(prefill["sparse"]),
        "decode_rounds": len(decode["sparse"]),
    }


def cells(folder: Path, arguments: argparse.Namespace) -> Iterator[Json]:
    sparse = sparse_model(
        folder, random=arguments.random, layers=arguments.layers, dtype=DTYPES.get(arguments.dtype or "")
    )
    dense = with_layer_kinds(sparse.config, dense_kinds(folder, sparse), sparse.state_dict())
    arguments.kinds = {name: model.config.layer_kinds() for name, model in zip(MODELS, (sparse, dense), strict=True)}
    warm_up = argparse.Namespace(**{**vars(arguments), "rounds": 1})
    measure(sparse, dense, min(arguments.lengths), warm_up)  # kernels are compiled and memory is allocated
    for length in arguments.lengths:
        yield measure(sparse, dense, length, arguments)


def spelled(cell: Json) -> str:
    times = (
        f"{kind} sparse {cell[f'sparse_{kind}_{unit}']:.4g} {unit}, dense {cell[f'dense_{kind}_{unit}']:.4g} {unit}, "
        f"dense / sparse {cell[f'{kind}_ratio']:.2f}"
        for kind, unit in (("prefill", "s"), ("decode", "ms"))
    )
    return f"{spell(cell['length'])}: {'; '.join(times)}"


def main(words: list[str] | None = None) -> list[Json]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="SPARSE", help="folder written by `nsa convert`")
    parser.add_argument("--lengths", type=parse_lengths, default=parse_lengths("8k,16k,32k,64k"))
    parser.add_argument("--random", action="store_true", help="random weights: only config.json is read")
    parser.add_argument("--layers", type=int, help="with --random: only the first layers")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as saved, fp32 with --random")
    parser.add_argument("--tokens", type=int, default=16, help="decoded per sample")
    parser.add_argument("--chunk", type=int, default=LoadedModel.prefill_chunk, help="prompt tokens per forward pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300.0, help="budget of a figure; one round is always run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        help="count processor seconds, on a busy machine with one thread",
    )
    parser.add_argument("--json", type=Path, help="write the figures and the machine there")
    arguments = parser.parse_args(words)
    logging.set_verbosity_error()
    results = []
    with pinned(arguments.threads):
        for cell in cells(arguments.folder, arguments):
            results.append(cell)
            print(spelled(cell), flush=True)
    if arguments.json:
        about = {name: getattr(arguments, name) for name in ("threads", "tokens", "chunk", "dtype", "random", "kinds")}
        record = {"model": arguments.folder.name, **about, "machine": describe_machine(), "cells": results}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
