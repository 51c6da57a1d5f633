"""`nsa train` or `nsa launch` with an injected fault; the only entry point that injects one.

python -m nsa.drill.faulty_rank train|launch FAULT NPROC CONFIG KEY=VALUE …
"""

import sys
from pathlib import Path

from nsa.config import load
from nsa.config.schema import RunConfig
from nsa.drill.inject import PlantedFault
from nsa.errors import NSAError

_MODULE = "nsa.drill.faulty_rank"


def _config(words: list[str]) -> RunConfig:
    return load(Path(words[0]), overrides=words[1:])


def _train(fault: str, words: list[str]) -> int:
    from nsa.drill.inject import inject
    from nsa.train.run import train
    from nsa.train.start_options import StartOptions

    options = StartOptions(resume="--resume" in words)  # the only option that a launcher adds here
    words = [word for word in words if word != "--resume"]

    inject(PlantedFault.from_json(fault))
    return train(_config(words), options)


def _launch(fault: str, nproc: int, words: list[str]) -> int:
    from nsa.train.launch.launcher import LaunchSettings, launch

    command = [sys.executable, "-m", _MODULE, "train", fault, "1", *words]
    settings = LaunchSettings(command=command, run_folder=Path(_config(words).train.out_dir), nproc=nproc)
    return launch(settings, lambda text: _log(f"launch: {text}"))


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(arguments: list[str]) -> int:
    command, fault, nproc, *words = arguments
    try:
        if command == "launch":
            return _launch(fault, int(nproc), words)
        return _train(fault, words)
    except NSAError as error:
        _log(f"{type(error).__name__}: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
