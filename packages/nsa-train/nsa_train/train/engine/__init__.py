"""Adapter to the training engine (OLMo-core): the only package that imports `olmo_core`.

The rest of `nsa_train.train` uses these modules and the public names below. Everything that overrides or touches a
private member of the engine is here, and each such use has a test of its own in
tests/nsa_train/train/engine/test_contract.py:

- `mixer`: `SequenceMixer` and `SequenceMixerConfig`, registered as "nsa".
- `transformer`: `Transformer`; overrides `_prepare_inputs`, `apply_compile`, `apply_cp`, `init_weights`, where it
  replaces `distribute_like` of the engine's initialisation.
- `lm_head`: `LMHead`; overrides `forward`, uses `_finalize_loss`.
- `build`: model, parallelism, optimizer and schedule from a `RunConfig`.
- `data_loader`: `TextDataLoaderBase`; overrides `_iter_batches`, sets `_epoch`.
- `bad_step_hook`: `TransformerTrainModule`; overrides `optim_step`, `_clip_grad_norm`, calls `_prepare_batch`,
  `_train_microbatch_context`, `_eval_batch_context` and `_set_model_mode`. `Trainer`; overrides `fit`, `_fit_epoch`,
  `_log_metrics`, uses `_metrics`, `_error`, `_iter_callbacks`.
- `checkpointer`: `Checkpointer`; overrides `save`, `save_async`, `load`, calls `_save_metadata`.
- `checkpoint_callback`: `CheckpointerCallback`; overrides `_await_last_checkpoint`, `post_train`, uses
  `_save_checkpoint`, `_future`, `_latest_checkpoint_step` and `_latest_checkpoint_path`.
- `engine_log`: filters on loggers of the engine, by their names.
- `deferred_imports`: modules that the engine imports at its top and only calls later; replaces the class that
  `Transformer.init_weights` imports.
- `optimizer`: AdamW of torch in place of that of `AdamWConfig.optimizer`.
- this file: sets OLMO_TRITON_CACHE_BASE before the engine is imported.
- `environment`: process groups, seeds, logging and the default device that the engine sets; replaces
  `patch_torch_stream_custom_ops` in runs that compile nothing.

The callbacks in `nsa_train.train.callbacks` subclass `Callback` and use its public hooks, `step` and `trainer` only.
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
    from olmo_core.train.common import TRAIN_CE_LOSS_METRIC

GRAD_NORM_METRIC = "optim/total grad norm"
"""Name under which the engine's train module records the gradient norm."""

__all__ = ["GRAD_NORM_METRIC", "TRAIN_CE_LOSS_METRIC", "Callback", "PathOrStr", "engine_log"]
