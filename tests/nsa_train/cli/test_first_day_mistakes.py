"""Mistakes of a first day: each ends with the code or class of its kind, and a message with rule, values and fix.

COMMANDS has a command line per mistake, CALLS a call of the library. The words are what a message must contain: names
and values of the mistake, and the name that corrects it; the wording around them is free.
"""

import json
import shutil
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

import nsa
from nsa.errors import ConfigError, KernelUnavailable
from nsa_train.cli import main as cli
from nsa_train.convert.export_folder import export_folder
from tests.nsa_train.train.runs import write_config
from tests.trained_runs import save_run

REFUSED, CONFIG, DATA, CHECKPOINT = 2, 20, 21, 22


class Mistake(NamedTuple):
    name: str
    command: str
    """CONFIG, NEW: a config file and a folder for its run; OLD: a folder that holds a run; EXPORTED: a model; TEXTS,
    KEYS: folders of documents, in KEYS under another JSON key; HERE: the folder with all of them."""
    code: int
    words: tuple[str, ...]


NEW_RUN = "train CONFIG train.out_dir=NEW"
LOCAL = f"{NEW_RUN} data.dataset=local data.path=TEXTS"
COMMANDS = (
    # The config and its settings
    Mistake("a config that is not there", "train HERE/my_config.yaml", CONFIG, ("my_config.yaml", "nsa init --list")),
    Mistake("a folder for a config", "train STARTED", CONFIG, ("STARTED is a folder", "STARTED/config.yaml")),
    Mistake("a folder without a config", "train TEXTS", CONFIG, ("TEXTS is a folder", "nsa init")),
    Mistake("a second start", "init STARTED", CHECKPOINT, ("STARTED", "config.yaml", "another folder")),
    Mistake("a shipped config misspelt", "train cpu_quikstart", CONFIG, ("cpu_quikstart", "cpu_quickstart")),
    Mistake("an unknown start", "init HERE/new --config quikstart", CONFIG, ("quikstart", "cpu_quickstart")),
    Mistake("a section misspelt", f"{NEW_RUN} trian.steps=5", CONFIG, ("trian.steps", "Did you mean train")),
    Mistake("a setting misspelt", f"{NEW_RUN} train.step=1", CONFIG, ("train.step", "steps")),
    Mistake("a setting of another name", f"{NEW_RUN} train.learning_rate=1", CONFIG, ("train.learning_rate", "lr,")),
    Mistake("a setting without its section", f"{NEW_RUN} steps=5", CONFIG, ("steps", "train.steps")),
    Mistake("a setting without a value", f"{NEW_RUN} train.steps 5", CONFIG, ("train.steps", "=")),
    Mistake("a word for a number", f"{NEW_RUN} train.steps=many", CONFIG, ("train.steps", "many", "whole number")),
    Mistake("a number out of range", f"{NEW_RUN} train.steps=0", CONFIG, ("train.steps", "0", "1")),
    Mistake("a choice misspelt", f"{NEW_RUN} train.lr_schedule=cosin", CONFIG, ("lr_schedule", "cosin", "cosine")),
    Mistake("indivisible heads", f"{NEW_RUN} model.n_heads=5", CONFIG, ("n_kv_groups (2)", "n_heads (5)", "Set ")),
    Mistake("an indivisible stride", f"{NEW_RUN} nsa.d=3", CONFIG, ("nsa.d (3)", "nsa.l (8)", "Set ")),
    Mistake("tabs in YAML", "config check HERE/broken.yaml", CONFIG, ("broken.yaml:2", "spaces")),
    Mistake("a key given twice", "config check HERE/twice.yaml", CONFIG, ("twice.yaml:3", "train.steps", "Keep one")),
    Mistake("an unknown hardware target", "estimate CONFIG --target h1000", CONFIG, ("h1000", "h100")),
    Mistake("an unknown GPU to plan for", "plan CONFIG --gpus h1000:8", CONFIG, ("--gpus h1000", "h100")),
    Mistake("a plan for no GPUs", "plan CONFIG", CONFIG, ("--gpus", "was not given", "--gpus h100-80gb:")),
    Mistake("an unknown rule to allow", f"{NEW_RUN} --allow flsh", CONFIG, ("flsh", "flash")),
    # The machine
    Mistake("a GPU that is not there", f"{NEW_RUN} runtime.device=cuda", CONFIG, ("runtime.device", "cuda", "cpu")),
    Mistake("a GPU for a model", "generate OLD -p x --device cuda", CONFIG, ("cuda", "Use cpu")),
    Mistake("fp16", f"{NEW_RUN} runtime.precision=fp16", REFUSED, ("runtime.precision", "fp16", "bf16")),
    Mistake("fewer rows than ranks", "launch CONFIG --nproc 8", REFUSED, ("train.batch_size", "4", "8")),
    Mistake("fewer rows than GPUs", "estimate CONFIG --target a100-80gb:8", REFUSED, ("train.batch_size", "4", "8")),
    Mistake("a port in use", "serve EXPORTED --port PORT", CONFIG, ("PORT", "--port")),
    Mistake("the exporter's port in use", "exporter OLD --port PORT", CONFIG, ("PORT", "--port")),
    # Runs and checkpoints
    Mistake("a folder that holds a run", "train CONFIG train.out_dir=OLD", REFUSED, ("step 20", "out_dir", "--resume")),
    Mistake("resuming as another", "train CONFIG train.out_dir=OLD --resume", CONFIG, ("nsa.l_sel: saved 16, now 8",)),
    Mistake("no such checkpoint", f"{NEW_RUN} --resume-from OLD/checkpoints/step9", CHECKPOINT, ("step9", "step20")),
    Mistake("no such checkpoint for ranks", "launch CONFIG --nproc 2 --resume-from OLD/step9", CHECKPOINT, ("step9",)),
    Mistake("weights that are none", f"{NEW_RUN} --init-from TEXTS", CHECKPOINT, ("TEXTS", "Name a run folder")),
    Mistake("weights that were changed", f"{NEW_RUN} --init-from CHANGED", CHECKPOINT, ("CHANGED", "SHA-256")),
    Mistake("weights that are not there", f"{NEW_RUN} --init-from HERE/no", CHECKPOINT, ("HERE/no", "does not exist")),
    Mistake("a run that is none", "report TEXTS", CONFIG, ("TEXTS", "run folder")),
    Mistake("a status of nothing", "status HERE/nothing", CONFIG, ("nothing",)),
    # Data and tokenizers
    Mistake("no such data", f"{NEW_RUN} data.dataset=local data.path=HERE/no", REFUSED, ("HERE/no", "Set data.path")),
    Mistake("data without its path", f"{NEW_RUN} data.dataset=local", CONFIG, ("data.path", "local")),
    Mistake(
        "texts as a set", f"{NEW_RUN} data.dataset=prepared data.path=TEXTS", REFUSED, ("TEXTS", "nsa data prepare")
    ),
    Mistake(
        "no such tokenizer", f"{LOCAL} data.tokenizer=HERE/b.json", REFUSED, ("b.json", "nsa data tokenizer train")
    ),
    Mistake("a corpus that is not there", "data prepare HERE/nothing HERE/out", CONFIG, ("nothing", "Check the path")),
    Mistake("a corpus misspelt", "data prepare HERE/text HERE/out", CONFIG, ("HERE/text'", "Did you mean TEXTS?")),
    Mistake("a pattern without files", "data prepare HERE/*.html HERE/out", CONFIG, ("*.html", ".jsonl", "pattern")),
    Mistake(
        "another key to prepare", "data prepare KEYS HERE/half", DATA, ("content", "--text-column", "--max-bad-units")
    ),
    Mistake("a file of another kind", "data prepare HERE/report.pdf HERE/out", CONFIG, ("report.pdf", ".txt")),
    Mistake("no such tokenizer to prepare with", "data prepare TEXTS HERE/out --tokenizer b.json", CONFIG, ("b.json",)),
    Mistake("another key of the text", "data tokenizer train KEYS HERE/t.json", DATA, ("content", "--text-column")),
    Mistake("texts inspected as a set", "data inspect TEXTS", DATA, ("TEXTS", "nsa data prepare")),
    Mistake("too small a vocabulary", "data tokenizer train TEXTS t --vocab-size 9", REFUSED, ("--vocab-size", "257")),
    # Models
    Mistake("a model that is none", "generate TEXTS -p x", CHECKPOINT, ("TEXTS", "nsa checkpoint ls")),
    Mistake("a model before its training", "generate STARTED -p x", CHECKPOINT, ("nsa train STARTED/config.yaml",)),
    Mistake("a model that is not there", "generate HERE/nothing -p x", CHECKPOINT, ("nothing",)),
    Mistake("no such prompt file", "generate OLD --prompt-file HERE/p.txt", CONFIG, ("p.txt", "pipe")),
    Mistake("a chat without a template", "chat OLD", CONFIG, ("chat template", "nsa generate")),
    Mistake("an export into a folder in use", "export hf OLD TEXTS", CHECKPOINT, ("TEXTS", "--overwrite")),
    Mistake("an export of nothing", "export hf TEXTS HERE/out", CHECKPOINT, ("TEXTS", "nsa checkpoint ls")),
    Mistake("a task misspelt", "eval EXPORTED --tasks needles", CONFIG, ("needles", "needle_multikey")),
    Mistake("a task of the harness", "eval EXPORTED --tasks hellaswag", CONFIG, ("hellaswag", "--lm-eval")),
    Mistake("an evaluation without data", "eval EXPORTED --tasks held_out_loss", CONFIG, ("--data",)),
    Mistake("a conversion of no model", "convert TEXTS HERE/out", CHECKPOINT, ("TEXTS", "config.json")),
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    here = tmp_path_factory.mktemp("first_day")
    for folder, key in (("texts", "text"), ("keys", "content")):
        (here / folder).mkdir()
        lines = [json.dumps({key: f"document {number} " * 30}) for number in range(9)]
        (here / folder / "a.jsonl").write_text("\n".join(lines))
    (here / "broken.yaml").write_text("train: {steps: 5}\n\tdata: [nothing\n")
    (here / "twice.yaml").write_text("train:\n  steps: 5\n  steps: 6\n")
    (here / "report.pdf").write_text("x")
    (here / "started").mkdir()
    write_config(here / "started").rename(here / "started" / "config.yaml")
    save_run(here / "old")
    export_folder(here / "old", here / "exported")
    changed = shutil.copytree(here / "old" / "checkpoints" / "step20", here / "step20")
    weights = next(changed.rglob("*.distcp"))
    weights.write_bytes(bytes(200) + weights.read_bytes()[200:])
    named = {name.upper(): str(here / name) for name in ("old", "exported", "texts", "keys", "started")}
    return {**named, "CHANGED": str(changed), "CONFIG": str(write_config(here)), "HERE": str(here)}


@pytest.fixture(scope="module")
def taken_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield str(server.getsockname()[1])


def run_command(words: list[str]) -> int:
    """Exit code of `nsa` with these words, in this process."""
    before, sys.argv = sys.argv, ["nsa", *words]
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


@pytest.mark.parametrize("mistake", COMMANDS, ids=lambda mistake: mistake.name.replace(" ", "_"))
def test_a_command_says_what_is_wrong_and_what_to_do(mistake, places, taken_port, tmp_path, capfd, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    named = {**places, "PORT": taken_port, "NEW": str(tmp_path / "new")}

    def filled(text: str) -> str:
        for name, value in named.items():
            text = text.replace(name, value)
        return text

    capfd.readouterr()
    code = run_command([filled(word) for word in mistake.command.split()])
    said = capfd.readouterr()
    message = said.err + said.out
    assert code == mistake.code, message
    assert "Traceback" not in message
    assert not (tmp_path / "new").exists()
    assert [word for word in map(filled, mistake.words) if word not in message] == [], message


def attention(**options):
    return nsa.NSAAttention(**{**dict(dim=64, n_heads=4, n_kv_groups=2, d_k=16, d_v=16), **options})


def model():
    return nsa.NSATransformer(100, 64, 1, n_heads=4, n_kv_groups=2, d_k=16, d_v=16)


def in_sdpa_layout(function, *more):
    return function(torch.randn(1, 4, 32, 16), torch.randn(1, 2, 32, 16), *more)


def huggingface_model():
    from nsa.hf.configuration import NSAConfig
    from nsa.hf.modeling import NSAModel

    return NSAModel(NSAConfig(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=1))


TOKENS = torch.zeros(1, 8, dtype=torch.long)
KEYS_OF_SDPA = torch.randn(1, 2, 32, 16)
SDPA = ("[batch, heads, tokens, width]", "4 heads", "32 tokens", "transpose(1, 2)")
CALLS: dict[str, tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = {
    "heads that groups do not divide": (
        lambda: attention(n_heads=5),
        ConfigError,
        ("n_kv_groups (2)", "n_heads (5)", "Set "),
    ),
    "an option misspelt": (lambda: attention(n_head=4), TypeError, ("n_head", "n_heads")),
    "hidden states of another width": (
        lambda: attention()(torch.randn(1, 8, 32)),
        ConfigError,
        ("[1, 8, 32]", "dim=64", "[batch, tokens, 64]"),
    ),
    "token ids for hidden states": (
        lambda: attention()(torch.ones(1, 8, 64, dtype=torch.long)),
        ConfigError,
        ("torch.int64", "[batch, tokens, 64]", "nsa.NSATransformer"),
    ),
    "hidden states without a batch": (
        lambda: attention()(torch.randn(8, 64)),
        ConfigError,
        ("[8, 64]", "[batch, tokens, dim]"),
    ),
    "hidden states of another width at known positions": (
        lambda: attention()(torch.randn(1, 8, 32), where=attention().locate(torch.randn(1, 8, 64))),
        ConfigError,
        ("[1, 8, 32]", "dim=64"),
    ),
    "embeddings of another width": (
        lambda: huggingface_model()(inputs_embeds=torch.randn(1, 8, 32)),
        ConfigError,
        ("[1, 8, 32]", "dim=64"),
    ),
    "tokens beyond the vocabulary": (lambda: model()(TOKENS + 100), ConfigError, ("100", "0 to 99", "tokenizer")),
    "negative tokens": (lambda: model()(TOKENS - 1), ConfigError, ("-1", "0 to 99")),
    "tokens beyond a Hugging Face model's": (
        lambda: huggingface_model()(TOKENS + 100),
        ConfigError,
        ("100", "0 to 99"),
    ),
    "a prompt beyond the cache": (
        lambda: model()(TOKENS, cache=model().new_cache(1, 4)),
        ConfigError,
        ("4", "8", "max_len"),
    ),
    "a cache of another batch": (
        lambda: model()(TOKENS, cache=model().new_cache(2, 16)),
        ConfigError,
        ("2 rows", "1", "new_cache"),
    ),
    "a backend misspelt": (
        lambda: attention(kernels="tritn")(torch.randn(1, 8, 64)),
        KernelUnavailable,
        ("tritn", "triton"),
    ),
    "the layout of SDPA": (
        lambda: in_sdpa_layout(nsa.nsa_attention, KEYS_OF_SDPA, torch.rand(1, 32, 4, 3)),
        ConfigError,
        SDPA,
    ),
    "the layout of SDPA in one branch": (
        lambda: in_sdpa_layout(nsa.sliding_attention, KEYS_OF_SDPA),
        ConfigError,
        SDPA,
    ),
    "the layout of SDPA to select": (lambda: in_sdpa_layout(nsa.select_blocks), ConfigError, SDPA),
    "the layout of SDPA with as many groups as heads": (
        lambda: nsa.nsa_attention(*[torch.randn(1, 4, 32, 16)] * 3, torch.rand(1, 32, 4, 3)),
        ConfigError,
        SDPA,
    ),
    "the layout of SDPA with given blocks": (
        lambda: nsa.selected_attention(*[torch.randn(1, 4, 32, 16)] * 3, torch.zeros(1, 32, 4, 3, dtype=torch.int32)),
        ConfigError,
        SDPA,
    ),
    "the layout of SDPA with documents": (
        lambda: nsa.sliding_attention(*[torch.randn(1, 4, 32, 16)] * 3, cu_seqlens=[0, 20, 32]),
        ConfigError,
        SDPA,
    ),
    "documents of other lengths": (
        lambda: nsa.sliding_attention(*[torch.randn(1, 32, 4, 16)] * 3, cu_seqlens=[0, 20, 30]),
        ConfigError,
        ("cu_seqlens", "32", "30"),
    ),
    "keys of another width": (
        lambda: nsa.nsa_attention(torch.randn(1, 32, 4, 16), *[torch.randn(1, 32, 2, 8)] * 2, torch.rand(1, 32, 4, 3)),
        ConfigError,
        ("[1, 32, 2, 8]", "[1, 32, 2, 16]"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_says_what_is_wrong_and_what_to_do(name):
    call, kind, words = CALLS[name]
    with pytest.raises(kind) as refused:
        call()
    message = str(refused.value)
    assert [word for word in words if word not in message] == [], message
    assert ("scaled_dot_product_attention" in message) == ("SDPA" in name), message
