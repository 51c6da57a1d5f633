"""Without the engine (the extra `train`) the tests that import it are left out."""

from importlib.util import find_spec

if find_spec("olmo_core") is None:
    collect_ignore_glob = ["*"]
