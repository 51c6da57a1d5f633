"""Small exported models, engines of vLLM for them, and the tokens that Transformers generates."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

from nsa.hf import NSAConfig, NSAForCausalLM
from nsa_train.convert.tokenizer_files import tokenizer_files
from nsa_train.data.tokenizer import ByteTokenizer

GEOMETRY = dict(l=8, d=4, l_sel=16, n_sel=4, w=24)
BLOCK = 32
MAX_LEN = 2048
SIZES = dict(
    vocab_size=257,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    v_head_dim=8,
    max_position_embeddings=MAX_LEN,
    eos_token_id=256,
)


def _override_kernels_once() -> None:
    """vLLM replaces Triton kernels by functions for the CPU whenever an engine starts. It looks through every loaded
    module, and fails at an object of llvmlite once numba has compiled something (as n-gram speculation does)."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
    current_platform.register_triton_kernel_overrides()
    sys.modules.update(hidden)
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


_override_kernels_once()


def export_small_model(folder: Path, **options: Any) -> NSAForCausalLM:
    """A model with random weights, large enough that attention decides the tokens, as an exported folder."""
    torch.manual_seed(0)
    model = NSAForCausalLM(NSAConfig(**{**SIZES, **GEOMETRY, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                (parameter.dim() > 1 and "phi" not in name)
                or "bias" in name
                or name.endswith(("w_place", "w_score", "w_square"))
            ):
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    for name, content in tokenizer_files(ByteTokenizer(), MAX_LEN).items():
        (folder / name).write_text(content, encoding="utf-8")
    return model


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    """Run an engine in this process and remove everything of it afterwards."""
    settings: dict[str, Any] = dict(
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_LEN,
        max_num_seqs=8,
        distributed_executor_backend="uni",
        disable_log_stats=False,
    )
    llm = LLM(str(folder), **settings | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def vllm_tokens(llm: LLM, prompts: Sequence[list[int]], n_new: int) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens after each prompt, all requested at once, and how many tokens of each prompt were cached."""
    sampling = SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs], [one.num_cached_tokens for one in outputs]


def transformers_tokens(model: NSAForCausalLM, prompts: Sequence[list[int]], n_new: int) -> list[list[int]]:
    """Generate from each prompt alone."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n_new,
            min_new_tokens=n_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(tokens[0, len(prompt) :].tolist())
    return answers


def counter(llm: LLM, name: str) -> float:
    """A metric of the engine."""
    return sum(getattr(metric, "value", 0) for metric in llm.get_metrics() if metric.name == f"vllm:{name}")
