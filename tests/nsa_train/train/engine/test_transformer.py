"""The engine's transformer: positions made once, activation checkpointing modes, compiled blocks."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.core.probe import probing
from nsa.core.rope import RotaryEmbedding
from nsa.options import CHECKPOINTING
from nsa_train.config.schema import RunConfig
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import build_train_module, compiles
from nsa_train.train.engine.transformer import transformer_config
from tests.attention_options import FAMILIES

CPU = torch.device("cpu")
LAYERS, ROWS, SEQ_LEN, VOCAB = 3, 2, 64, 97


def config_of(checkpointing="off", compile="off", model=None, **nsa) -> RunConfig:
    sizes = dict(dim=32, n_layers=LAYERS, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, vocab_size=VOCAB)
    return RunConfig.model_validate(
        {
            "model": {**sizes, **(model or {})},
            "nsa": {**dict(l=8, d=4, l_sel=8, n_sel=4, w=16), **nsa},
            "runtime": dict(device="cpu", precision="fp32", gradient_checkpointing=checkpointing, compile=compile),
            "kernels": dict.fromkeys(("compressed", "select", "selected", "sliding"), "portable"),
            "train": dict(seq_len=SEQ_LEN, batch_size=ROWS, steps=1),
        }
    )


def module_of(config: RunConfig):
    return build_train_module(config, VOCAB, RankInfo(), CPU)


def packed_batch(seed: int) -> dict:
    """Rows of 1 to 6 documents of random lengths."""
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=dice)
    lengths = []
    for _ in range(ROWS):
        cuts = torch.randperm(SEQ_LEN - 1, generator=dice)[: int(torch.randint(1, 6, (), generator=dice))] + 1
        lengths.append(torch.tensor([0, *sorted(cuts.tolist()), SEQ_LEN], dtype=torch.int32).diff())
    doc_lens = torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True)
    most = [int(row.max()) for row in lengths]
    return {"input_ids": tokens, "labels": tokens.roll(-1, 1), "doc_lens": doc_lens, "max_doc_lens": most}


def plain_batch(seed: int) -> dict:
    batch = packed_batch(seed)
    return {name: batch[name] for name in ("input_ids", "labels")}


def loss_of(module, batch: dict) -> torch.Tensor:
    return module.model_forward(**batch, loss_reduction="mean", return_logits=False).loss


def gradients(module, batch: dict) -> dict[str, torch.Tensor]:
    loss_of(module, batch).backward()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in module.model.named_parameters()}


class OperatorCounts(TorchDispatchMode):
    """How often each of our operators is executed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "nsa":
            self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [plain_batch(0), packed_batch(0)], ids=["plain", "packed"])
@pytest.mark.parametrize("nsa", [{}, dict(phi="mlp", rope_compressed="after"), dict(kv="shared")], ids=str)
def test_shared_positions_change_nothing(batch, nsa):
    """Compares with the engine's own class and the same weights, where every layer computes its positions."""
    compare_with_the_engines_class(config_of(**nsa), batch)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_rotate_differently_get_their_own_positions(name):
    compare_with_the_engines_class(config_of(**FAMILIES[name]), packed_batch(0))


def compare_with_the_engines_class(config: RunConfig, batch: dict) -> None:
    module = module_of(config)
    engines = transformer_config(config, VOCAB).build(init_device="cpu")
    engines.load_state_dict(module.model.state_dict())
    more = {name: batch[name] for name in ("doc_lens", "max_doc_lens") if name in batch}
    assert torch.equal(module.model(batch["input_ids"], **more), engines(batch["input_ids"], **more))


@pytest.mark.parametrize("batch", [plain_batch(0), packed_batch(0)], ids=["plain", "packed"])
def test_rope_tables_are_made_once_per_forward_pass(batch, monkeypatch):
    computed, module = [], module_of(config_of())
    compute = RotaryEmbedding._computed
    monkeypatch.setattr(RotaryEmbedding, "_computed", lambda self, *a: computed.append(a) or compute(self, *a))
    loss_of(module, batch)
    assert len(computed) == 1
    computed.clear()
    loss_of(module_of(config_of(model=dict(rope_layers=["none", "scaled"]))), batch)
    assert len(computed) == 1


@pytest.mark.parametrize(("checkpointing", "times"), [("off", 1), ("selective", 1), ("full", 2)])
def test_how_often_operators_run(checkpointing, times):
    module = module_of(config_of(checkpointing))
    with OperatorCounts() as counts:
        loss_of(module, packed_batch(1)).backward()
    forward = {name: n for name, n in counts.seen.items() if "backward" not in name}
    head = {"nsa::linear_cross_entropy": 1}
    assert forward == {"nsa::attend": 3 * LAYERS * times, "nsa::select": LAYERS * times, **head}
    assert counts.seen["nsa::attend_backward"] == 3 * LAYERS


@pytest.mark.parametrize("checkpointing", CHECKPOINTING[1:])
def test_checkpointing_leaves_gradients_and_names_as_they_are(checkpointing):
    wanted = gradients(module_of(config_of()), packed_batch(2))
    module = module_of(config_of(checkpointing))
    grads = gradients(module, packed_batch(2))
    assert grads.keys() == wanted.keys()
    assert all(torch.equal(grads[name], grad) for name, grad in wanted.items())
    saved = module.state_dict()["model"]
    assert saved.keys() == module_of(config_of()).state_dict()["model"].keys()


def test_auto_compiles_on_a_gpu_only():
    def on(name: str) -> list[bool]:
        return [compiles(config_of(compile=name), torch.device(device)) for device in ("cpu", "cuda")]

    assert (on("auto"), on("on"), on("off")) == ([False, True], [True, True], [False, False])


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def step(module, batch: dict, probed: bool = False) -> float:
    with probing(module.model) if probed else nullcontext({}) as probes:
        loss = loss_of(module, batch)
        loss.backward()
    module.optim.step()
    module.zero_grads()
    assert all(probe.figures["gate_entropy_mean"] > 0 for probe in probes.values())
    return loss.item()


INDUCTOR = [pytest.mark.nightly, pytest.mark.timeout(1800)]
PACKINGS = 12  # one more than the first that is probed again


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def compiler(request, monkeypatch):
    """Graphs, breaks and recompilations are those of dynamo, whatever compiles the graphs."""
    with_inductor = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **k: with_inductor(self, backend=request.param, **k))
    torch._dynamo.reset()
    counters.clear()
    return request.param


@pytest.mark.parametrize(
    "checkpointing", ["off", *(pytest.param(c, marks=pytest.mark.nightly) for c in ("selective", "full"))]
)
def test_compiled_blocks_are_one_graph_for_all_packings(checkpointing, compiler):
    """Requires no graph break, nothing compiled again but for the statistics of log steps, and the losses of eager."""
    module, eager = module_of(config_of(checkpointing, "on")), module_of(config_of(checkpointing))
    losses = [step(module, packed_batch(0), probed=True)]
    assert graphs() == 2  # the block, for all layers; and the head
    losses.append(step(module, packed_batch(1)))
    assert graphs() == 3
    losses += [step(module, packed_batch(n), probed=n % 10 == 0) for n in range(2, PACKINGS)]
    assert graphs() == 3
    expected = [step(eager, packed_batch(n), probed=n % 10 == 0) for n in range(PACKINGS)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert not [name for name in module.state_dict()["model"] if "_orig_mod" in name or "_checkpoint" in name]


@pytest.mark.parametrize(
    ("checkpointing", "times"), [pytest.param("off", 1, marks=pytest.mark.nightly), ("selective", 1), ("full", 2)]
)
def test_how_often_operators_run_in_a_compiled_step(checkpointing, times, compiler):
    """Without checkpointing every night: selective checkpointing, too, runs each operator once."""
    module = module_of(config_of(checkpointing, "on"))
    step(module, packed_batch(0))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(module, packed_batch(1))
    counts = {event.key: event.count for event in seen.key_averages()}
    assert (counts["nsa::attend"], counts["nsa::select"]) == (3 * LAYERS * times, LAYERS * times)
    assert counts["nsa::attend_backward"] == 3 * LAYERS
