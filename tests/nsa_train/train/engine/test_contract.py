"""Contract of `nsa_train.train.engine` with OLMo-core: one test per override or private member.

A test that fails here after an upgrade of the engine names the member that changed: read the new source of that member,
adapt the module of `nsa_train.train.engine` that uses it, then the test. `test_an_upgrade_is_noticed_by_name` renames
or changes each member in turn and requires the test for it to fail.
"""

import importlib
import inspect
import pkgutil
import re
import signal
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

import torch
from olmo_core.config import Config
from olmo_core.data.data_loader import DataLoaderBase, TextDataLoaderBase
from olmo_core.distributed import parallel as engine_parallel
from olmo_core.nn.attention import SequenceMixer, SequenceMixerConfig
from olmo_core.nn.lm_head import LMHead, LMOutputWithLoss
from olmo_core.nn.transformer import Transformer
from olmo_core.train import Checkpointer, Trainer
from olmo_core.train import prepare_training_environment as prepare
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import TrainModule, TransformerTrainModule
from olmo_core.train.train_module.transformer.config import TransformerContextParallelConfig
from torch import nn

from nsa_train.checkpoint.run_state import RunRecord
from nsa_train.config import load
from nsa_train.record.run_folder import RunFolder
from nsa_train.train import datasets
from nsa_train.train import engine as engine_package
from nsa_train.train.callbacks.evaluation import EvaluationCallback
from nsa_train.train.callbacks.heartbeat_callback import HeartbeatCallback
from nsa_train.train.callbacks.replica_check import ReplicaCheckCallback
from nsa_train.train.callbacks.stop_requests import StopRequestCallback
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import build_train_module, build_trainer
from nsa_train.train.engine.checkpoint_callback import CheckpointCallback, make_checkpoint_callback
from nsa_train.train.engine.checkpointer import VerifiedCheckpointer, make_checkpointer
from nsa_train.train.engine.data_loader import RowLoader, to_engine
from nsa_train.train.engine.mixer import NSAMixer, NSAMixerConfig
from nsa_train.train.engine.nan_guard import BadStepCallback, RollbackTrainer, _RollBack
from nsa_train.train.engine.train_module import StepSkippingTrainModule
from nsa_train.train.engine.transformer import transformer_config
from nsa_train.train.run_outputs import EventLogCallback
from tests.nsa_train.train.engine.upgrades import rename, rewrite
from tests.nsa_train.train.runs import write_config

pytestmark = pytest.mark.filterwarnings("ignore")
CPU, ALONE, STEPS = torch.device("cpu"), RankInfo(), 3
OUR_CALLBACKS = (
    BadStepCallback, CheckpointCallback, EvaluationCallback, EventLogCallback, HeartbeatCallback, ReplicaCheckCallback,
    StopRequestCallback,
)  # fmt: skip


class Engine:
    """A real trainer of the engine with our overrides, on one rank, and how often each override was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder / "run")
        self.folder.make()
        self.config = load(
            write_config(folder),
            overrides=[f"train.out_dir={self.folder.path}", f"train.steps={STEPS}", "train.save_every=2",
                       "train.save_async=false"],
        )  # fmt: skip
        self.vocab_size = datasets.vocabulary(self.config)
        self.data = datasets.training_rows(self.config, self.vocab_size)
        self.calls: Counter[str] = Counter()

    def module(self) -> StepSkippingTrainModule:
        return build_train_module(self.config, self.vocab_size, ALONE, CPU)

    def trainer(self, *more: Callback, **settings) -> RollbackTrainer:
        config = self.config.model_copy(update={"train": self.config.train.model_copy(update=settings)})
        loader = RowLoader(self.data, global_rows=config.train.global_rows, ranks=ALONE, work_dir=self.folder.path)
        checkpointer = make_checkpointer(config, self.folder.path)
        callbacks = {"checkpointer": make_checkpoint_callback(config)}
        callbacks |= {f"more{number}": callback for number, callback in enumerate(more)}
        trainer = build_trainer(config, self.folder, self.module(), loader, checkpointer, callbacks)
        checkpointer.record = lambda: RunRecord(
            step=trainer.global_step, world_size=1, config=config.model_dump(mode="json"),
            data_cursor=loader.state_dict(),
        )  # fmt: skip
        return trainer

    def fit(self, *more: Callback, **settings) -> RollbackTrainer:
        trainer = self.trainer(*more, **settings)
        trainer.fit()
        return trainer

    @contextmanager
    def counting(self, cls: type, *names: str):
        """Count the calls of these methods of ours while the block runs."""
        with ExitStack() as patches:
            for name in names:
                patches.enter_context(mock.patch.object(cls, name, self._counted(name, getattr(cls, name))))
            yield

    def _counted(self, name, method):
        def counted(this, *args, **kwargs):
            self.calls[name] += 1
            return method(this, *args, **kwargs)

        return counted


@pytest.fixture
def engine(tmp_path) -> Engine:
    return Engine(tmp_path)


def same_parameters(ours, theirs) -> None:
    """An override takes what the engine passes: the same names, kinds and defaults."""
    signatures = [list(inspect.signature(function).parameters.values()) for function in (ours, theirs)]
    ours_, theirs_ = ([(p.name, p.kind, p.default) for p in parameters] for parameters in signatures)
    assert ours_ == theirs_


# Trainer


def test_trainer_runs_epochs_through_fit_epoch(engine):
    with engine.counting(RollbackTrainer, "_fit_epoch"):
        engine.fit()
    assert engine.calls["_fit_epoch"] == 1


@pytest.mark.parametrize("hook", ["post_step", "post_train"])
def test_trainer_reports_every_error_to_each_callback_once(engine, hook):
    reported = []

    class Listening(Callback):
        def on_error(self, exc):
            reported.append(type(exc))

    def fail(self):
        raise ArithmeticError

    failing = type("Failing", (Callback,), {hook: fail})
    with pytest.raises(ArithmeticError):
        engine.trainer(Listening(), failing()).train()
    assert reported == [ArithmeticError]


def test_trainer_installs_signal_handlers_before_pre_train_and_never_again(engine):
    """`SignalHandlers` installs its handlers once more in `pre_train`; they must hold until training ends."""
    seen, mine = [], lambda *_: None

    class Reader(Callback):
        def pre_train(self):
            seen.append(signal.getsignal(signal.SIGTERM) == self.trainer._handle_os_signal)
            signal.signal(signal.SIGTERM, mine)

        def post_step(self):
            seen.append(signal.getsignal(signal.SIGTERM) is mine)

    before = signal.getsignal(signal.SIGTERM)
    try:
        engine.fit(Reader())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [True] * (1 + STEPS)


def test_trainer_stops_after_the_step_that_cancels_without_sync(engine):
    class Cancelling(Callback):
        def post_step(self):
            if self.step == 2:
                self.trainer.cancel_run("enough", no_sync=True)

    assert engine.fit(Cancelling()).global_step == 2


def test_trainer_calls_callbacks_by_priority(engine):
    seen = []

    def note(self):
        seen.append(self.priority)

    engine.fit(*(type("C", (Callback,), {"priority": p, "post_step": note})() for p in (-10, 0, 10)), steps=1)
    assert seen == [10, 0, -10]


class BadStep(BadStepCallback):
    """Rolls back the last step, once, by one step."""

    def __init__(self):
        super().__init__(None, None, None, None, None)
        self.rolled_back = []

    def check_step(self, loss, grad_norm):
        if self.step == STEPS and not self.rolled_back:
            raise _RollBack("too high")
        return False

    def roll_back(self, reason):
        self.rolled_back.append((reason, self.step))
        self.trainer.global_step -= 1

    def post_train_batch(self):
        pass

    def post_checkpoint_loaded(self, path):
        pass


def test_trainer_rolls_back_and_begins_the_next_epoch(engine):
    """The loop of `fit` calls `_fit_epoch` again after one that rolled back, at the step of the checkpoint."""
    trainer, bad_steps = engine.trainer(), BadStep()
    trainer.add_callback("bad_steps", bad_steps)
    trainer.train_module.check_step = bad_steps.check_step
    trainer.train()
    assert bad_steps.rolled_back == [("too high", STEPS)]
    assert trainer.global_step == STEPS


def test_trainer_keeps_and_reduces_no_metrics(engine):
    with engine.counting(RollbackTrainer, "record_metric"), mock.patch.object(Trainer, "run_bookkeeping_op") as reduced:
        trainer = engine.fit()
    assert engine.calls["record_metric"] >= STEPS
    assert (trainer._metrics, reduced.call_args_list) == ({}, [])


# Train module


def test_train_module_leaves_out_a_step_that_is_bad(engine):
    trainer = engine.trainer()
    module, seen = trainer.train_module, []

    def always_bad(loss, grad_norm):
        seen.append((torch.isfinite(loss).item(), grad_norm.item() > 0))
        return True

    module.check_step = always_bad
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    trainer.fit()
    assert seen == [(True, True)] * STEPS
    assert all(torch.equal(value, before[name]) for name, value in module.model.state_dict().items())
    moments = [value for state in module.optim.state.values() for key, value in state.items() if key != "step"]
    assert not any(torch.any(value) for value in moments)


def test_train_module_makes_one_pass_without_a_trainer(engine):
    """The dry run: `forward_backward` and `clip_gradients` give the loss and the norm of a real step."""
    module = engine.module()
    loss = module.forward_backward(to_engine(engine.data.open().next_batch(engine.config.train.batch_size)))
    norm = float(module.clip_gradients(float("inf")))
    trained = engine.fit(steps=1).train_module
    assert [float(trained.step_loss), float(trained.step_grad_norm)] == pytest.approx([loss, norm], rel=1e-5)


# Data loader


def test_data_loader_iterates_through_iter_batches(engine):
    with engine.counting(RowLoader, "_iter_batches", "reshuffle", "get_mock_batch"):
        trainer = engine.fit()
    assert engine.calls == {"_iter_batches": 1, "reshuffle": 1, "get_mock_batch": 1}
    assert trainer.data_loader.batches_processed == STEPS


def test_data_loader_reads_its_epoch_from_epoch(engine):
    loader = engine.trainer().data_loader
    loader.reshuffle(7)
    assert loader.epoch == 7


def test_data_loader_state_goes_through_checkpoints(engine):
    engine.fit()
    resumed = engine.trainer()
    with engine.counting(RowLoader, "load_state_dict"):
        resumed.load_checkpoint(engine.folder.checkpoints / f"step{STEPS}", load_trainer_state=True)
    assert engine.calls["load_state_dict"] == 1
    assert resumed.data_loader.state_dict()["cursor"]["next_row"] == STEPS * resumed.data_loader.global_rows


# Checkpointer


@pytest.mark.parametrize("name", ["save", "save_async", "load"])
def test_checkpointer_overrides_take_the_engines_parameters(name):
    same_parameters(getattr(VerifiedCheckpointer, name), getattr(Checkpointer, name))


def test_checkpointer_saves_through_save_with_the_engines_own_note(engine):
    with engine.counting(VerifiedCheckpointer, "save"):
        engine.fit()
    assert engine.calls == {"save": 2}  # at step 2 and at the end
    checkpoint = engine.folder.checkpoints / f"step{STEPS}"
    files = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert files >= {"train/rank0.pt", "state.json", ".metadata.json", "model_and_optim/.metadata", "COMMIT.json"}
    assert Checkpointer.dir_is_checkpoint(checkpoint)


def test_checkpointer_saves_in_the_background_through_save_async(engine):
    with engine.counting(VerifiedCheckpointer, "save_async"):
        engine.fit(save_async=True)
    assert engine.calls["save_async"] == 1
    committed = engine.folder.checkpoints / "step2"
    assert ".metadata.json" in (committed / "COMMIT.json").read_text()


def test_checkpointer_loads_through_load_and_then_reports_to_callbacks(engine):
    engine.fit()
    seen = []

    class Reader(Callback):
        def post_checkpoint_loaded(self, path):
            seen.append((self.step, self.trainer.checkpointer.loaded_record.step))

    resumed = engine.trainer(Reader())
    with engine.counting(VerifiedCheckpointer, "load"):
        resumed.load_checkpoint(engine.folder.checkpoints / "step2", load_trainer_state=True, load_optim_state=True)
    assert engine.calls["load"] == 1
    assert seen == [(2, 2)]


# Checkpoint callback


class Requesting(Callback):
    """Asks for a checkpoint after this step, and notes whether one is being saved."""

    def __init__(self, at=0):
        self.at, self.saving = at, []

    def post_step(self):
        checkpoints = self.trainer.callbacks["checkpointer"]
        self.saving.append(checkpoints.saving is not None)
        if self.step == self.at:
            checkpoints.save_now()


def test_checkpoint_callback_saves_in_the_background(engine):
    requesting = Requesting()
    engine.fit(requesting, save_async=True)
    assert requesting.saving == [False, True, True]


@pytest.mark.parametrize(("at", "saves"), [(1, 3), (2, 2)])
def test_checkpoint_callback_saves_on_request_unless_just_saved(engine, at, saves):
    with engine.counting(CheckpointCallback, "_save"):
        engine.fit(Requesting(at))
    assert engine.calls["_save"] == saves
    assert "requested" in (engine.folder.checkpoints / f"step{at}" / "COMMIT.json").read_text()


def test_checkpoint_callback_replaces_the_engines(engine):
    assert [type(c) for c in engine.trainer().callbacks.values() if isinstance(c, CheckpointerCallback)] == [
        CheckpointCallback
    ]


# Callbacks with public hooks


@pytest.mark.parametrize("ours", OUR_CALLBACKS, ids=lambda cls: cls.__name__)
def test_callback_hooks_exist_with_these_parameters(ours):
    engines = CheckpointerCallback if issubclass(ours, CheckpointerCallback) else Callback
    hooks = [
        name for name, value in vars(ours).items() if inspect.isfunction(value) and re.match("pre_|post_|on_", name)
    ]
    for name in [*hooks, *(["close"] if "close" in vars(ours) else [])]:
        same_parameters(getattr(ours, name), getattr(engines, name))


@pytest.mark.parametrize("ours", OUR_CALLBACKS, ids=lambda cls: cls.__name__)
def test_callback_fields_hide_nothing_of_the_engines(ours):
    engines = CheckpointerCallback if issubclass(ours, CheckpointerCallback) else Callback
    own = {field.name for field in fields(ours)} - {field.name for field in fields(engines)}
    assert not own & set(dir(engines))


# Model


def test_mixer_is_registered_and_built_as_nsa(engine):
    assert SequenceMixerConfig.get_registered_class("nsa") is NSAMixerConfig
    model = transformer_config(engine.config, engine.vocab_size).build(init_device="cpu")
    assert all(isinstance(block.attention, NSAMixer) for block in model.blocks.values())


@pytest.mark.parametrize("name", ["forward", "num_flops_per_token", "init_weights", "apply_tp", "apply_cp"])
def test_mixer_overrides_exist_in_the_engine(name):
    assert callable(getattr(SequenceMixer, name))


def test_mixer_weights_come_from_init_weights(engine):
    with engine.counting(NSAMixer, "init_weights"):
        engine.module()
    assert engine.calls["init_weights"] == engine.config.model.n_layers


def test_context_parallelism_reaches_layers_through_apply_cp():
    assert ".apply_cp(cp_mesh, ring=ring, uly=uly)" in inspect.getsource(Transformer.apply_cp)
    styles = TransformerContextParallelConfig.zig_zag(2), TransformerContextParallelConfig.ulysses(2)
    assert [style.ring is not None for style in styles] == [True, False]
    assert [style.uly is not None for style in styles] == [False, True]


def test_the_head_hands_its_options_on():
    """`ChunkedHead` takes the loss from `nsa.model.loss` and the rest from the engine's head."""
    options = inspect.signature(LMHead.forward).parameters.keys() - {"self", "x"}
    assert options == {
        "labels", "ignore_index", "loss_reduction", "z_loss_multiplier", "loss_div_factor", "return_logits",
        "logits_to_keep",
    }  # fmt: skip
    assert LMOutputWithLoss._fields == ("logits", "loss", "ce_loss", "z_loss")


# Environment


def test_environment_takes_these_arguments():
    """`nsa_train.train.engine.environment` also undoes the default device that this function sets."""
    assert {"seed", "backend", "timeout", "shared_filesystem"} <= inspect.signature(prepare).parameters.keys()
    assert "torch.set_default_device" in inspect.getsource(prepare)


# The list of what is overridden or touched besides the engine's extension points


MODULES = [importlib.import_module(f"{engine_package.__name__}.{module.name}")
           for module in pkgutil.iter_modules(engine_package.__path__)]  # fmt: skip
EXTENSION_POINTS = (nn.Module, Callback, TrainModule, DataLoaderBase, SequenceMixer, SequenceMixerConfig)


def engine_classes(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.startswith("olmo_core")]


def is_extension_point(cls: type, name: str) -> bool:
    """Whether a base class that is made to be extended declares this method, abstract if it is the data loader's, or
    it is what every config defines."""
    if issubclass(cls, Config) and name == "build":
        return True
    for base in EXTENSION_POINTS:
        declared = vars(base).get(name) if issubclass(cls, base) else None
        if declared is not None and (base is not DataLoaderBase or getattr(declared, "__isabstractmethod__", False)):
            return True
    return False


def used_members() -> set[str]:
    """Overridden methods of the engine, and its private members that our code reads or sets."""
    used: set[str] = set()
    for module in MODULES:
        classes = [cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__]
        for cls in classes:
            for name in vars(cls):
                bases = [base for base in engine_classes(cls) if name in vars(base)]
                if bases and inspect.isfunction(getattr(cls, name)) and not name.startswith("__"):
                    used |= set() if is_extension_point(cls, name) else {f"{bases[-1].__name__}.{name}"}
        private = set(re.findall(r"\.(_[a-zA-Z]\w*)", inspect.getsource(module)))
        for base in {base for cls in classes for base in engine_classes(cls)}:
            own = set(vars(base)) | set(re.findall(r"self\.(_\w+)", inspect.getsource(base)))
            used |= {f"{base.__name__}.{name}" for name in private & own if not is_extension_point(base, name)}
        used |= {f"parallel.{name}" for name in private if hasattr(engine_parallel, name)}
    return used


def test_the_list_of_overridden_and_private_members_is_complete_and_short():
    listed = set(re.findall(r"`(\w+\.\w+)`", engine_package.__doc__.partition("Beyond that")[2]))
    assert used_members() == listed
    assert len(listed) <= 8


# Each member in turn is renamed or changed, and the test for it must fail.

STEP_MODULE = (Trainer, TransformerTrainModule)
LOADERS = (Trainer, DataLoaderBase, TextDataLoaderBase)
SAVING = (Trainer, Checkpointer)
UPGRADES = {
    "fit_epoch": (test_trainer_runs_epochs_through_fit_epoch, rename, "_fit_epoch", Trainer),
    "record_metric": (test_trainer_keeps_and_reduces_no_metrics, rename, "record_metric", Trainer),
    "priority": (
        test_trainer_calls_callbacks_by_priority, rewrite, Trainer, "_sort_callbacks", "reverse=True", "reverse=False"
    ),
    "rollback": (
        test_trainer_rolls_back_and_begins_the_next_epoch,
        rewrite, Trainer, "fit", "while not self.training_complete:", "if not self.training_complete:",
    ),
    "optim_step": (
        test_train_module_leaves_out_a_step_that_is_bad, rename, "optim_step", Trainer, TransformerTrainModule
    ),
    "one pass": (
        test_train_module_makes_one_pass_without_a_trainer, rename, "model_forward", TransformerTrainModule
    ),
    "signals": (
        test_trainer_installs_signal_handlers_before_pre_train_and_never_again,
        rewrite, Trainer, "fit", "signal.signal(signal.SIGTERM, self._handle_os_signal)", "None",
    ),
    "signals later": (
        test_trainer_installs_signal_handlers_before_pre_train_and_never_again,
        rewrite, Trainer, "_fit_epoch", "self.train_module.zero_grads()\n\n    first",
        "signal.signal(signal.SIGTERM, self._handle_os_signal)\n\n    first",
    ),
    "cancel_run": (test_trainer_stops_after_the_step_that_cancels_without_sync, rename, "cancel_run", Trainer),
    "iter_batches": (test_data_loader_iterates_through_iter_batches, rename, "_iter_batches", DataLoaderBase),
    "reshuffle": (test_data_loader_iterates_through_iter_batches, rename, "reshuffle", *LOADERS),
    "get_mock_batch": (test_data_loader_iterates_through_iter_batches, rename, "get_mock_batch", *LOADERS),
    "epoch": (test_data_loader_reads_its_epoch_from_epoch, rename, "_epoch", DataLoaderBase),
    "loader state": (
        test_data_loader_state_goes_through_checkpoints,
        rewrite, Trainer, "load_state_dict", 'self.data_loader.load_state_dict(state_dict["data_loader"])', "pass",
    ),
    "save": (test_checkpointer_saves_through_save_with_the_engines_own_note, rename, "save", *SAVING),
    "save parameters": (
        partial(test_checkpointer_overrides_take_the_engines_parameters, name="save"),
        rewrite, Checkpointer, "save", "ephemeral: bool = False,", "ephemeral: bool = False, keep: bool = True,",
    ),
    "save_async": (test_checkpointer_saves_in_the_background_through_save_async, rename, "save_async", *SAVING),
    "load": (test_checkpointer_loads_through_load_and_then_reports_to_callbacks, rename, "load", *SAVING),
    "hook": (
        lambda engine: test_callback_hooks_exist_with_these_parameters(HeartbeatCallback),
        rename, "pre_load_batch", Callback, Trainer,
    ),
    "hidden field": (
        lambda engine: test_callback_fields_hide_nothing_of_the_engines(ReplicaCheckCallback),
        setattr, Callback, "collectives", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UPGRADES)
def test_an_upgrade_is_noticed_by_name(name, tmp_path, monkeypatch):
    test, change, *arguments = UPGRADES[name]
    if change is setattr:
        monkeypatch.setattr(*arguments, raising=False)
    else:
        change(monkeypatch, *arguments)
    call = partial(test, Engine(tmp_path)) if "engine" in inspect.signature(test).parameters else test
    with pytest.raises(Exception) as failure:  # noqa: PT011 - an assertion, or whatever the engine raises then
        call()
    assert not isinstance(failure.value, (NameError, SyntaxError)), "the simulated upgrade is broken"
