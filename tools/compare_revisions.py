"""Speed and bits of this checkout's library beside those of another revision, in one run.

    python -m tools.compare_revisions main                 attention, decode and a training step, in turns
    python -m tools.compare_revisions HEAD~3 --rounds 40 --only decode
    python -m tools.compare_revisions main --bits          outputs and gradients of every kind of layer and CPU backend

Each round runs the same work in a process of either revision, one thread each, with real-time priority where that is
allowed. The figure is the time of the other revision divided by this one's: above 1 this checkout is faster. Exit code
1 if a median is below --least, or bits differ.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARY = Path("packages/nsa-attention")
WORKER = """
import hashlib, json, sys, time, torch
from contextlib import nullcontext
torch.set_num_threads(1)
from nsa import NSAAttention, NSATransformer
from nsa.bench.machine import real_time_priority, require_real_time
from nsa.errors import ConfigError

try:
    require_real_time()
    priority = real_time_priority
except ConfigError:
    priority = nullcontext

torch.manual_seed(0)
layer = NSAAttention(768, 12, 2, 64, 64)
short = NSAAttention(64, 4, 2, 16, 16, l=8, d=4, l_sel=16, n_sel=4, w=24)
model = NSATransformer(256, 128, 2, n_heads=4, n_kv_groups=2, d_k=32, d_v=32, selector_loss=1.0)
long_row, short_row, token = torch.randn(1, 2048, 768), torch.randn(1, 64, 64), torch.randn(1, 1, 768)
tokens = torch.randint(256, (2, 512))
cache = layer.new_cache(1, 8400, rewind=64)
with torch.no_grad():
    layer(torch.randn(1, 8192, 768), cache=cache)

@torch.no_grad()
def attention():
    layer(long_row)

@torch.no_grad()
def short_rows():
    for _ in range(20):
        short(short_row)

@torch.no_grad()
def decode():
    for _ in range(40):
        layer(token, cache=cache)

def train():
    model.zero_grad()
    model.loss(tokens, tokens.roll(-1, 1)).backward()

def bits(backend, kind, options):
    torch.manual_seed(1)
    sizes = dict(n_heads=4, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=16, n_sel=4, w=24)
    one = NSATransformer(32, 32, 2, layers=(kind,), kernels=backend, **sizes, **options)
    rows, results = torch.randint(32, (2, 96)), []
    one.loss(rows, rows.roll(-1, 1)).backward()
    results += [p.grad for p in one.parameters() if p.grad is not None]
    one.requires_grad_(False).eval()
    results += [one(rows), one(rows, cu_doc_lens=[0, 3, 40, 130, 192])]
    cache = one.new_cache(2, 96)
    results += [one(rows[:, part], cache=cache) for part in (slice(0, 60), *(slice(t, t + 1) for t in range(60, 96)))]
    digest = hashlib.sha256(" ".join(one.state_dict()).encode())
    for x in results:
        digest.update(x.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()

works = dict(attention=attention, short_rows=short_rows, decode=decode, train=train)
for line in sys.stdin:
    if line.startswith("["):
        print(bits(*json.loads(line)), flush=True)
        continue
    cache.crop(8192)
    with priority():
        began = time.perf_counter()
        works[line.strip()]()
        took = time.perf_counter() - began
    print(took, flush=True)
"""
KINDS = ("nsa", "dense", "window", "global", "merged")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    dict(kv="per_branch", phi="mlp", qk_norm=True, selector_loss=1.0),
    dict(phi="softmax", selector_loss=1.0, selector_blocks="all"),
    dict(phi="softmax", coarse_block=4, n_coarse=5, selector_loss=0.5),
)
WORKS = ("attention", "short_rows", "decode", "train")


class Worker:
    """A process that does work with one revision's library."""

    def __init__(self, tree: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": str(tree / LIBRARY), "OMP_NUM_THREADS": "1"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process = subprocess.Popen([sys.executable, "-c", WORKER], env=environ, cwd=tree, **pipes)  # type: ignore[call-overload]

    def answer(self, line: str) -> str:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return str(self._process.stdout.readline()).strip()

    def seconds(self, work: str) -> float:
        return float(self.answer(work))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def ratios(before: Worker, now: Worker, work: str, rounds: int) -> list[float]:
    """The other revision's time divided by this one's, of each round; who goes first alternates."""
    for worker in (before, now) * 2:  # compile, allocate
        worker.seconds(work)
    speeds = []
    for number in range(rounds):
        took = {worker: worker.seconds(work) for worker in ((before, now) if number % 2 else (now, before))}
        speeds.append(took[before] / took[now])
    return sorted(speeds)


def differing(before: Worker, now: Worker) -> list[str]:
    """Layers whose outputs, gradients or names of parameters are not those of the other revision."""
    layers = [json.dumps(layer) for layer in itertools.product(("cpu", "portable", "reference"), KINDS, OPTIONS)]
    return [layer for layer in layers if before.answer(layer) != now.answer(layer)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="what git calls it")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", choices=WORKS, action="append", help="some of the works")
    parser.add_argument("--least", type=float, default=0.98)
    parser.add_argument("--bits", action="store_true", help="compare results instead of speed")
    options = parser.parse_args()
    medians = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(other), options.revision], cwd=ROOT, check=True
        )
        before, now = Worker(other), Worker(ROOT)
        try:
            if options.bits:
                others = differing(before, now)
                total = 3 * len(KINDS) * len(OPTIONS)
                print("\n".join([*others, f"{total - len(others)} of {total} layers: the same bits"]))
                return int(bool(others))
            for work in options.only or WORKS:
                speed = ratios(before, now, work, options.rounds)
                medians.append(statistics.median(speed))
                low, high = speed[len(speed) // 4], speed[-1 - len(speed) // 4]
                print(
                    f"{work:11} {medians[-1]:.3f} times as fast as {options.revision} ({low:.3f} to {high:.3f})",
                    flush=True,
                )
        finally:
            for worker in (before, now):
                worker.end()
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)
    return int(min(medians) < options.least)


if __name__ == "__main__":
    sys.exit(main())
