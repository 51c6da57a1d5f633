"""Checks that take milliseconds, before a command imports torch and Transformers for seconds: packages, paths, device,
the run folder and the data of a run.

Those of an option are its callback, so that every command that has the option checks it.
"""

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.errors import CheckpointError, ConfigError
from nsa_train import names

if TYPE_CHECKING:
    from nsa_train.config import RunConfig
    from nsa_train.train.start_options import StartOptions

DATA_PACKAGES = ("numpy", "pyarrow", "tokenizers", "fsspec", "huggingface_hub", "urllib3", "zstandard")
_HF_PACKAGES = ("transformers", "safetensors", "numpy", "tokenizers")
_SERVE_PACKAGES = ("fastapi", "openai", "uvicorn")
_EXTRAS = {
    "data": DATA_PACKAGES,
    "hf": _HF_PACKAGES,
    "train": (*DATA_PACKAGES, *_HF_PACKAGES, "olmo_core", "tensorboard", "boto3", "botocore"),  # boto3 with olmo_core
    "serve": (*_HF_PACKAGES, *_SERVE_PACKAGES),
    "eval": (*_HF_PACKAGES, "lm_eval"),
    "ops": ("prometheus_client",),
    "track": ("wandb", "mlflow"),
    "dev": ("triton",),
}
"""Optional packages that each extra installs, the smaller of two extras first."""
_OPTIONAL = {package for packages in _EXTRAS.values() for package in packages}
_REQUIRED = ("torch", "pydantic", "yaml")
"""Packages of every install that commands import when they need them: missing after an install with --no-deps."""
_TRAINING_PACKAGES = ("torch", "olmo_core", "safetensors", "tensorboard", "numpy", "tokenizers")
MODEL_PACKAGES = ("torch", *_HF_PACKAGES)
SERVER_PACKAGES = (*MODEL_PACKAGES, *_SERVE_PACKAGES)
DEMO_PACKAGES = tuple(dict.fromkeys((*_TRAINING_PACKAGES, *DATA_PACKAGES, *MODEL_PACKAGES)))
"""Packages of everything between a text and a model that writes."""

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|mtia)(:\d+)?")
_RUN_INSIDE = "run"
"""Where the config that `nsa init FOLDER` writes has its run folder."""
_CONFIG_INSIDE = "config.yaml"
_PARTS_OF_RUN = (
    names.CHECKPOINTS, names.ENV, names.COMMIT, names.MODEL_SAFETENSORS, names.heartbeat(0), "config.json",
)  # fmt: skip


def require_packages(*packages: str) -> None:
    """Raise with every package that is missing, and the one command that installs them."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise ConfigError(how_to_install(missing))


def require_training_packages(config: "RunConfig") -> None:
    """Raise with every package that this run needs and that is missing."""
    settings = {
        "wandb": config.track.wandb_project,
        "mlflow": config.track.mlflow_uri,
        "boto3": config.train.checkpoint_store,
    }
    require_packages(*_TRAINING_PACKAGES, *(package for package, value in settings.items() if value))


def require_folder_and_data(config: "RunConfig", options: "StartOptions") -> None:
    """Raise with the preflight rules about the run folder and local data that this run breaks. The run checks them
    again, with all others."""
    from nsa_train.planning.hardware import CPU, DEVICES, HardwareTarget
    from nsa_train.planning.preflight_facts import DryRun, PreflightFacts, read_folder_facts
    from nsa_train.planning.preflight_rules import CHECKED_EARLY, HALT_FILE, check_rules, failed, require_passed
    from nsa_train.train.datasets import look_for_data

    here, folder = HardwareTarget(DEVICES[CPU], here=True), read_folder_facts(config)
    data = look_for_data(config, here, folder, options.resuming)
    tried = replace(DryRun.not_tried("torch is not imported yet"), data=data)
    facts = PreflightFacts(config, here, None, folder, tried, resuming=options.resuming)
    halted = (
        () if options.clear_halt else (HALT_FILE,)
    )  # alone it is no reason yet: the run ends with a code of its own
    verdicts = check_rules(facts, options.allow, (*CHECKED_EARLY, *halted))
    if {verdict.rule for verdict in failed(verdicts)} != {HALT_FILE}:
        require_passed(verdicts)


def is_known_package(package: str) -> bool:
    return package in _OPTIONAL or package in _REQUIRED


def how_to_install(packages: list[str]) -> str:
    extras = _fewest_extras({package for package in packages if package in _OPTIONAL})
    several = len(packages) > 1
    what = f"packages {', '.join(packages)}, which are" if several else f"package {packages[0]}, which is"
    it = "They are" if several else "It is"
    if extras:
        where = f"{it} part of the extra{'s' * (len(extras) > 1)} {', '.join(map(repr, extras))}"
    else:
        where = f"{it} part of every install of nsa-train"
    extra = f"[{','.join(extras)}]" if extras else ""
    return (
        f"this command needs the {what} not installed. {where}. Run: pip install "
        f"'nsa-train{extra}' (in a checkout: pip install -e packages/nsa-attention -e 'packages/nsa-train{extra}')."
    )


def _fewest_extras(packages: set[str]) -> list[str]:
    """The extras to install for these packages: as few and as small ones as there are, sorted."""
    several = (names for number in range(len(_EXTRAS) + 1) for names in combinations(_EXTRAS, number))
    return sorted(next(names for names in several if packages <= {each for name in names for each in _EXTRAS[name]}))


def find_run(folder: Path) -> Path:
    """The run folder; the one inside for a folder of `nsa init`, which holds config, text, data and run."""
    inside = folder / _RUN_INSIDE
    return inside if _is_run(inside) and not _is_run(folder) else folder


def find_model(path: Path | None) -> Path | None:
    """The folder of a model, as `find_run`; raises if there is none."""
    if path is None:
        return None
    folder = find_run(path)
    if not folder.exists() and not folder.is_symlink():  # a broken link is explained when it is followed
        raise CheckpointError(f"{path} does not exist. Name a run folder (train.out_dir), a checkpoint or a model.")
    if not _is_run(folder) and (config := folder / _CONFIG_INSIDE).is_file():
        raise CheckpointError(f"{path} holds a config and no trained model. Train one first: nsa train {config}")
    return folder


def require_chat_template(model: Path) -> None:
    """Raise if this is a model without a chat template; only an exported folder has one."""
    from nsa_train.convert.folder_files import CONFIG, read_chat_template

    exported = (model / CONFIG).exists()
    if (exported or _is_run(model)) and not (exported and read_chat_template(model)):
        raise ConfigError(
            f"{model} has no chat template: it was trained to continue text, not to answer messages. Use `nsa generate "
            f"{model} --prompt TEXT`, or add a chat template to the tokenizer of an exported folder."
        )


def _is_run(folder: Path) -> bool:
    return any((folder / part).exists() for part in _PARTS_OF_RUN)


def require_device(name: str | None) -> str | None:
    """Raise if --device is no device of this machine."""
    if name is not None:
        require_device_of("device", name)
    return name


def require_device_of(setting: str, name: str) -> None:
    """Raise if this is no device of this machine. The CPU needs no look, and torch for the CPU alone sees no GPU."""
    if name == "cpu":
        return
    if not _DEVICE.fullmatch(name):
        raise ConfigError(f"{setting} is {name!r}: it must be cpu, cuda or cuda:N.")
    if name.startswith("cuda") and (torch_version := _version("torch")).endswith("+cpu"):
        raise ConfigError(
            f"{setting} is {name!r}, and torch {torch_version} is built for the CPU alone. Use cpu, or install torch "
            "with CUDA: https://pytorch.org/get-started/locally"
        )
    from nsa.kernels.gpu_versions import device_named

    device_named(name)


def require_tokenizer(spec: str | None) -> str | None:
    """Raise if there is no such file; what is in it is checked when it is used."""
    if spec is not None and spec != "byte" and not Path(spec).exists():
        from nsa_train.data.tokenizer import load_tokenizer

        load_tokenizer(spec)
    return spec


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
