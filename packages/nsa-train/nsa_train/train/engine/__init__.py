"""Adapter to the training engine (OLMo-core): the only package that imports `olmo_core`.

The rest of `nsa_train.train` uses these modules and the public names below. They extend the engine where it says so:
callbacks, a train module, a data loader, a sequence mixer, an LM head and a model with a `forward` of their own.
Beyond that they override or touch these members of it (tests/nsa_train/train/engine/test_contract.py compares the list
with the code):

- `Trainer._fit_epoch`: a rollback must leave the loop in the middle of a step, so that nothing of it is saved,
  evaluated or logged; a hook can only end the run.
- `Trainer.record_metric`: the metrics pipeline cannot be switched off, and ranks may wait in it for each other forever.
- `Transformer.init_weights`: the engine scatters sharded weights, which torch cannot do for an axis that two kinds of
  parallelism divide unevenly.
- `DataLoaderBase._epoch`: `reshuffle`, which every data loader must define, has no other way to set the epoch.
- `Checkpointer.save`, `Checkpointer.save_async`, `Checkpointer.load`: the engine's write without hashes and a commit
  record, and read by unpickling.
- `parallel._WORLD_MESH`: the engine makes one mesh per process; a simulation builds several models in one.

`engine_log` and `environment` also undo what the engine does to the process: log messages, handlers, default device.
`deferred_imports`, the optimizer of `build` and `environment` keep modules out of a rank that it never uses, torch's
compiler first; for that `environment` replaces the engine's patch of torch's streams where nothing is compiled. Without
them a rank takes 1.5 s of CPU time longer to start (tests/test_import_cost.py).
"""

import os

from nsa.files import temporary_cache_folder
from nsa_train.train.engine import engine_log  # before the engine: it filters what the engine logs while it is imported
from nsa_train.train.engine.deferred_imports import deferred_imports

# The engine makes this folder when it is imported. Its default has one name for all users of a machine, and only the
# first of them can write there.
os.environ.setdefault("OLMO_TRITON_CACHE_BASE", str(temporary_cache_folder("engine-triton")))

with deferred_imports():
    from olmo_core.aliases import PathOrStr
    from olmo_core.train.callbacks import Callback

__all__ = ["Callback", "PathOrStr", "engine_log"]
