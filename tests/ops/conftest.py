"""Without the engine (the extra `train`) there is nothing to run on a cluster."""

from importlib.util import find_spec

if find_spec("olmo_core") is None:
    collect_ignore_glob = ["test_slurm.py", "test_ssh.py"]
