"""Train a dense model of about 5M parameters on long documents, convert it, warm it up, heal it.

    python -m experiments.convert_dense.run

artifacts/demo holds parquet files of English text with many long documents; the recorded results are of the Debian
documentation that `nsa data demo` of commit 88b37fb3 and earlier wrote.

Every stage is an `nsa` command, printed before it runs; its output is in FOLDER/logs. A stage whose result exists is
left out, and a training run that was interrupted continues, so the same command goes on after an interruption. Then:

    python -m experiments.convert_dense.results
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from nsa_train import names

FOLDER = Path("artifacts/convert_dense")
DEMO = Path("artifacts/demo")
LONG, VOCABULARY = 4096, 2048
N_LAYERS = 6
MODEL = dict(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=N_LAYERS, num_attention_heads=8,
    num_key_value_heads=4, rope_theta=40_000.0, max_position_embeddings=LONG, tie_word_embeddings=True,
)  # fmt: skip
SPARSE = ["--l=32", "--d=16", "--l-sel=32", "--n-sel=8", "--window=96"]
"""Token 4,096 reads 352 keys and scores 248: 14.6 % of the row."""
SHORT_STEPS, LONG_STEPS = 360, 300
TOKENS_PER_STEP = 8192
TRAINED_TOKENS = (SHORT_STEPS + LONG_STEPS) * TOKENS_PER_STEP


@dataclass(frozen=True)
class Stage:
    """A command and the file or folder that it leaves behind."""

    name: str
    made: Path
    words: list[str]

    @property
    def done(self) -> bool:
        return self.made.exists()


def healing_steps(share: float) -> int:
    """Optimizer steps that read this share of the tokens of the dense training."""
    return max(1, round(share * TRAINED_TOKENS / TOKENS_PER_STEP))


def _train(folder: Path, out: str, config: Path, init: Path | None, seq_len: int, steps: int, *more: str) -> Stage:
    output = folder / out
    data = ["data.dataset=prepared", f"data.path={folder / 'set'}", "data.report_docs=0"]
    sizes = [f"train.seq_len={seq_len}", f"train.batch_size={TOKENS_PER_STEP // seq_len}", f"train.steps={steps}"]
    place = ["runtime.device=cpu", "runtime.precision=fp32", f"train.out_dir={output}", "train.log_every=5"]
    start = [] if init is None else ["--init-from", str(init)]
    words = ["nsa", "train", str(config), *data, *sizes, *place, *more, *start, "--resume"]
    return Stage(out, output / names.MODEL_SAFETENSORS, words)


def stages(folder: Path, demo: Path) -> list[Stage]:
    """Return all stages, in order."""
    return [*_dense_stages(folder, demo), *_sparse_stages(folder)]


def _dense_stages(folder: Path, demo: Path) -> list[Stage]:
    """A Llama of Transformers with random weights, trained at 512 tokens and then at 4,096."""
    outputs = {name: folder / name for name in ("long", "bpe.json", "set", "llama", "start", "exported", "dense")}
    path = {name: str(value) for name, value in outputs.items()}
    modules, all_layers = [sys.executable, "-m"], ",".join(map(str, range(N_LAYERS)))
    documents = [*modules, "experiments.nsa_vs_dense.long_documents", str(demo), path["long"], "--at-least", "20000"]
    tokenizer = ["nsa", "data", "tokenizer", "train", path["long"], path["bpe.json"], "--vocab-size", str(VOCABULARY)]
    rows = ["nsa", "data", "prepare", path["long"], path["set"], "--tokenizer", path["bpe.json"], "--held-out", "0.05"]
    llama = [*modules, "experiments.convert_dense.random_llama", path["llama"], path["bpe.json"]]
    config, start = outputs["start"] / "run.yaml", outputs["start"]
    short = ["train.lr=3e-3", "train.warmup_steps=20", "train.final_lr_ratio=0.3", "train.eval_every=60"]
    long = ["train.lr=1e-3", "train.warmup_steps=10", "train.eval_every=40"]
    return [
        Stage("documents", outputs["long"] / "documents.jsonl", documents),
        Stage("tokenizer", outputs["bpe.json"], tokenizer),
        Stage("set", outputs["set"], rows),
        Stage("llama", outputs["llama"], llama),
        Stage("start", start, ["nsa", "convert", path["llama"], path["start"], "--keep-dense", all_layers]),
        _train(folder, "short", config, start, 512, SHORT_STEPS, *short, "train.save_every=60"),
        _train(folder, "dense_run", config, folder / "short", LONG, LONG_STEPS, *long, "train.save_every=20"),
        Stage("exported", outputs["exported"], ["nsa", "export", "hf", str(folder / "dense_run"), path["exported"]]),
        Stage(
            "dense",
            outputs["dense"],
            ["nsa", "convert", path["exported"], path["dense"], "--to-dense", "--like", path["start"]],
        ),
    ]


def _sparse_stages(folder: Path) -> list[Stage]:
    """Conversions by φ, warm-up and healing of the one that learns, and what the same tokens do without conversion."""
    trainings = []
    for phi in ("avg", "softmax"):
        words = ["nsa", "convert", str(folder / "dense"), str(folder / f"sparse_{phi}"), *SPARSE, f"--phi={phi}"]
        trainings.append(Stage(f"sparse_{phi}", folder / f"sparse_{phi}", words))
    sparse_folder = folder / "sparse_but_layer_0"
    words = ["nsa", "convert", str(folder / "dense"), str(sparse_folder), *SPARSE, "--phi=avg", "--keep-dense=0"]
    trainings.append(Stage(sparse_folder.name, sparse_folder, words))
    sparse, quiet = folder / "sparse_softmax", ("train.eval_every=0", "train.save_every=0")
    most = healing_steps(0.05)
    trainings.append(_train(folder, "warmed_up", sparse / "warmup.yaml", sparse, LONG, most, *quiet))
    low = ("train.lr=1e-4", "train.warmup_steps=1", *quiet)
    for share in (0.01, 0.05):
        steps, begin = healing_steps(share), folder / "warmed_up"
        trainings.append(_train(folder, f"healed_{share:.0%}", sparse / "run.yaml", begin, LONG, steps, *low))
    dense = folder / "start/run.yaml"
    high = ("train.lr=1e-3", "train.warmup_steps=5", *quiet)
    return [
        *trainings,
        _train(folder, "healed_without_warm_up", sparse / "run.yaml", sparse, LONG, most, *low),
        _train(folder, "dense_more", dense, folder / "dense_run", LONG, most, *low),
        _train(folder, "from_nothing", sparse / "run.yaml", None, LONG, most, *high),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for everything that is made (default {FOLDER})")
    parser.add_argument("--demo", type=Path, default=DEMO, help=f"folder of parquet files (default {DEMO})")
    parser.add_argument("--until", help="name of the last stage to run")
    options = parser.parse_args()
    logs = options.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for stage in stages(options.folder, options.demo):
        if not stage.done:
            print(f"$ {shlex.join(stage.words)}", flush=True)
            begin = time.monotonic()
            with open(logs / f"{stage.name}.txt", "a", encoding="utf-8") as log:
                environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
                done = subprocess.run(stage.words, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
            if done.returncode != 0:
                print(f"exit code {done.returncode}: see {logs / stage.name}.txt")
                return 1
            print(f"  {time.monotonic() - begin:,.0f} s", flush=True)
        if stage.name == options.until:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
