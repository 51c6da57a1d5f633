"""Environment variables: the table of every `NSA_*` name, and the only place that reads the environment for settings.

A variable sets one or more settings, or is retired with a note on its replacement. Variables that set several settings
are applied first, so that the variable of one branch overrides the one for all branches. docs/ENV.md is generated from
this table.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from nsa.kernel_variables import ALL_BRANCHES, variable_of
from nsa_train.config.layer import SettingsLayer, nearest
from nsa_train.config.model_sections import KernelsConfig
from nsa_train.config.setting_types import BOOLEAN

PREFIX = "NSA_"
CONFIG_FILE = "CONFIG"

_BRANCHES = tuple(KernelsConfig.model_fields)


@dataclass(frozen=True)
class _EnvVariable:
    """A variable that sets each of `keys`; `negated` if a true value turns the setting off."""

    keys: tuple[str, ...]
    meaning: str
    negated: bool = False


VARIABLES: dict[str, _EnvVariable] = {
    "NSA_TOKENIZER": _EnvVariable(("data.tokenizer",), "Tokenizer: byte, or the path of a tokenizers JSON file."),
    "NSA_FWE_PREFETCH": _EnvVariable(("data.prefetch",), "Prepare batches in the background."),
    "NSA_FWE_Q": _EnvVariable(("data.queue_depth",), "Batches the prefetcher keeps ready; 8 to 16 is usual."),
    "NSA_FWE_WARMUP_BATCHES": _EnvVariable(("data.warmup_batches",), "Batches to have ready before step 1."),
    "NSA_FWE_WARMUP_TIMEOUT": _EnvVariable(("data.warmup_timeout_s",), "Longest wait for the warm-up batches."),
    "NSA_PREFILL_TILE": _EnvVariable(("runtime.prefill_chunk",), "Prompt tokens per forward pass when generating."),
    "NSA_ROPE_SCALE": _EnvVariable(("model.rope_scale",), "Divisor of positions before rotation."),
    "NSA_SDPA_NO_FLASH": _EnvVariable(
        ("runtime.use_flash",), "A true value restricts kernels=auto to the portable backend.", negated=True
    ),
    "NSA_KERNEL_CACHE": _EnvVariable(
        ("runtime.kernel_cache",), "Folder for compiled CPU kernels and tuned tile sizes."
    ),
    "NSA_TUNE_KERNELS": _EnvVariable(
        ("runtime.tune_kernels",),
        "Time tile sizes on the GPU at first use; if off, GPUs of one model give bitwise equal results.",
    ),
    ALL_BRANCHES: _EnvVariable(
        tuple(f"kernels.{branch}" for branch in _BRANCHES),
        "Backend of every branch, e.g. portable or reference; also for the library and nsa doctor, where an argument "
        "that names a backend wins.",
    ),
    **{
        variable_of(branch): _EnvVariable(
            (f"kernels.{branch}",), f"Backend of kernels.{branch} alone; wins over NSA_KERNEL."
        )
        for branch in _BRANCHES
    },
}

_SELECTION = "the selected branch has one exact path per backend, chosen by kernels.selected"
_FLASH_ATTN = "flash-attn is a package of the backend flash, chosen by"

RETIRED: dict[str, str] = {
    "NSA_USE_FA2": f"{_FLASH_ATTN} kernels.sliding and kernels.compressed",
    "NSA_USE_FA2_WIN": f"{_FLASH_ATTN} kernels.sliding",
    "NSA_USE_FA2_CMP": f"{_FLASH_ATTN} kernels.compressed",
    "NSA_FA2_MIN_LEN_WIN": f"{_FLASH_ATTN} kernels.sliding, where auto chooses one backend for every length",
    "NSA_FA2_MIN_LEN_CMP": f"{_FLASH_ATTN} kernels.compressed, where auto chooses one backend for every length",
    "NSA_USE_TRITON_SEL": "backends are chosen per branch; set kernels.selected to require one",
    "NSA_USE_SEL_PACK": _SELECTION,
    "NSA_USE_SEL_MASK": _SELECTION,
    "NSA_FORCE_SEL_MASK": _SELECTION,
    "NSA_USE_SEL_VARLEN": _SELECTION,
    "NSA_FORCE_PARITY": "set NSA_KERNEL=portable, or kernels.* in the config, to run the portable path in every branch",
    "NSA_PREFILL_BATCHED": "there is one forward; NSA_PREFILL_TILE (runtime.prefill_chunk) sets how it is chunked",
    "NSA_STRICT_ASSERTS": "no step checks causality, tests do; scripts/run_gpu_causality_test.sh runs them",
    "NSA_DEBUG_COMPARE": "backends and reasons are always logged; NSA_KERNEL=reference runs plain PyTorch",
    "NSA_ENV_STATIC": "the environment is read once, at start, always",
    "NSA_DISABLE_AUX_STATS": "statistics are computed on log steps only; train.log_every sets how often",
    "NSA_TB_DISABLE": "TensorBoard copies the heartbeat on log steps only; train.log_every sets how often",
    "NSA_DISABLE_CSV_LOGS": "the CSV files copy the heartbeat on log steps only; train.log_every sets how often",
}


def snapshot() -> dict[str, str]:
    """The NSA_* variables of this process and CONFIG, to be passed to `load`."""
    return {name: text for name, text in os.environ.items() if name.startswith(PREFIX) or name == CONFIG_FILE}


def without_settings() -> dict[str, str]:
    """All other variables, for a child process whose settings are all on its command line."""
    ours = snapshot()
    return {name: text for name, text in os.environ.items() if name not in ours}


def read(environ: Mapping[str, str]) -> SettingsLayer:
    """The settings given by environment variables. A variable that is set but empty counts as unset."""
    layer = SettingsLayer()
    names = [name for name, text in environ.items() if name.startswith(PREFIX) and text.strip()]
    for name in sorted(names, key=lambda name: (-len(VARIABLES[name].keys) if name in VARIABLES else 0, name)):
        where = f"environment {name}"
        if variable := VARIABLES.get(name):
            text = environ[name].strip()
            if variable.negated:
                with suppress(ValidationError):  # anything else is refused by the schema
                    text = str(not BOOLEAN.validate_python(text))
            for key in variable.keys:
                layer.add(key, text, origin=where, where=where)
        elif name in RETIRED:
            layer.notices.append(f"{where} is retired and ignored: {RETIRED[name]}.")
        else:
            guess = nearest(name, (*VARIABLES, *RETIRED))
            hint = f"Did you mean {guess}?" if guess else "docs/ENV.md lists them all."
            layer.problems.append(f"{where}: unknown environment variable. {hint}")
    return layer
