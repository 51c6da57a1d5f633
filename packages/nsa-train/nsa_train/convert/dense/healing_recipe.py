"""Settings of the runs that follow a conversion, written beside the converted model: `warmup.yaml` and `run.yaml`.

The warm-up trains the parameters that the source does not have and freezes the source's: φ on dense attention's mass of
every block, gates on the loss of the model. Healing then trains everything at a low rate.
"""

from typing import Any

import yaml

from nsa_train.config.schema import RunConfig

RUN_CONFIG, WARMUP_CONFIG = "run.yaml", "warmup.yaml"
_DATA = "data.dataset=prepared data.path=SET train.seq_len=LENGTH"
_WARMUP_HEAD = f"""\
# Warm-up of this converted model: trains the parameters that its source does not have; the source's are frozen.
#   nsa train OUT/{WARMUP_CONFIG} {_DATA} train.out_dir=RUNS/warmup --init-from OUT
"""
_HEALING_HEAD = f"""\
# Training of this converted model, all parameters, at a low rate.
#   nsa train OUT/{RUN_CONFIG} {_DATA} train.out_dir=RUNS/healed --init-from {{origin}}
"""
_HEALING = {"lr": 3e-5, "warmup_steps": 50}
_PHI_RATE, _GATE_RATE = 1e-3, 3e-4  # gates at ten times that rate made the loss worse


def recipe_files(config: RunConfig, vocab_size: int, *, has_new: bool) -> dict[str, str]:
    """Text of each file by its name. `has_new`: whether the model has parameters that its source does not have."""
    healing = _sections(config, vocab_size) | {"train": _HEALING}
    files = {RUN_CONFIG: _HEALING_HEAD.format(origin="RUNS/warmup" if has_new else "OUT") + yaml.safe_dump(healing)}
    if has_new:
        files[WARMUP_CONFIG] = _WARMUP_HEAD + yaml.safe_dump(_warmup(config, vocab_size))
    return files


def _warmup(config: RunConfig, vocab_size: int) -> dict[str, Any]:
    gated, learned = "nsa" in config.model.attention, config.attention.compression.operator.has_weights
    trainable = ["*.phi_k.*"] * learned + ["*.gates.*"] * gated + ["*.phi_v.*"] * (gated and learned)
    sections = _sections(config, vocab_size)
    if learned:
        sections["nsa"] = {**sections.get("nsa", {}), "selector_loss": 1.0, "selector_blocks": "all"}
    rate = _GATE_RATE if gated else _PHI_RATE
    train = {"trainable": trainable, "lr": rate, "lr_schedule": "constant", "weight_decay": 0.0}
    return sections | {"train": train}


def _sections(config: RunConfig, vocab_size: int) -> dict[str, Any]:
    """The sections of a config file that describe the model; settings at their defaults are left out."""
    model = config.model.model_dump(mode="json", exclude_defaults=True) | {"vocab_size": vocab_size}
    nsa = config.nsa.model_dump(mode="json", exclude_defaults=True)
    return {"model": model} | ({"nsa": nsa} if nsa else {})
