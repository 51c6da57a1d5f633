"""Far recall: how soon does NSA learn to find one of 16 pairs far behind the query, with which remedy for selection?

    python -m tools.far_recall base selector shared --steps 500

Every pair is one token (key and value together), so that one layer of attention is enough. Rows hold 16 pairs among
filler and end with questions for keys; the window does not reach any pair. Prints accuracy, how often the pair's block
is selected in layer 0, and accuracy where it was and was not.
"""

import argparse
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import Probe
from nsa.core.selector_loss import selector_layers, set_sampling_step
from nsa.model.loss import IGNORE
from nsa.model.transformer import NSATransformer

KEYS, VALUES, FILLERS, QUESTIONS = 16, 16, 16, 256
VOCABULARY = KEYS * VALUES + KEYS + FILLERS
GEOMETRY = dict(l=16, d=8, l_sel=16, n_sel=8, w=32)
VARIANTS: dict[str, dict[str, object]] = {
    "base": {},
    "shared_keys": dict(kv="shared_keys"),
    "shared": dict(kv="shared"),
    "selector": dict(selector_loss=1.0),
    "shared_selector": dict(kv="shared", selector_loss=1.0),
}


class BlockProbe(Probe):
    """Keeps the chosen blocks of a forward pass."""

    blocks_BSGN: Tensor

    def record(self, gates: Tensor, idx_BSGN: Tensor, *_: object) -> None:
        self.blocks_BSGN = idx_BSGN


def rows(batch: int, length: int, gap: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and labels [batch, length], and where each asked pair stands [batch, QUESTIONS]."""
    body = length - QUESTIONS - gap
    tokens = torch.randint(KEYS * VALUES + KEYS, VOCABULARY, (batch, length), generator=draw)
    places = torch.rand(batch, body, generator=draw).topk(KEYS).indices
    values = torch.randint(VALUES, (batch, KEYS), generator=draw)
    tokens.scatter_(1, places, torch.arange(KEYS) * VALUES + values)
    asked = torch.randint(KEYS, (batch, QUESTIONS), generator=draw)
    tokens[:, -QUESTIONS:] = KEYS * VALUES + asked
    labels = torch.full_like(tokens, IGNORE)
    labels[:, -QUESTIONS:] = values.gather(1, asked)
    return tokens, labels, places.gather(1, asked)


@torch.no_grad()
def examine(model: NSATransformer, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    tokens, labels, places = batch
    model.eval()
    attention: NSAAttention = model.blocks[0].attention  # type: ignore[assignment]
    probe = attention.probe = BlockProbe()
    right = model(tokens)[:, -QUESTIONS:, :VALUES].argmax(-1) == labels[:, -QUESTIONS:]
    attention.probe = None
    model.train()
    chosen = probe.blocks_BSGN[:, -QUESTIONS:].flatten(2)
    hit = (chosen == (places // GEOMETRY["l_sel"])[..., None]).any(-1)
    found = {"accuracy": right, "hit": hit, "right_if_hit": right[hit], "right_if_missed": right[~hit]}
    return {name: x.double().mean().item() for name, x in found.items()}


def train(variant: str, steps: int, seed: int, length: int, gap: int, batch: int, every: int) -> Iterator[str]:
    torch.manual_seed(seed)
    draw, held_out = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(10_000 + seed)
    sizes = dict(n_heads=4, n_kv_groups=2, d_k=16, d_v=16)
    model = NSATransformer(VOCABULARY, 64, 2, **sizes, **GEOMETRY, **VARIANTS[variant])  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    test, began = rows(32, length, gap, held_out), time.perf_counter()
    for step in range(steps + 1):
        if step % every == 0:
            text = " ".join(f"{name}={value:.3f}" for name, value in examine(model, test).items())
            yield f"{variant} seed={seed} step={step} {text} seconds={time.perf_counter() - began:.0f}"
        set_sampling_step(selector_layers(model), step)
        tokens, labels, _ = rows(batch, length, gap, draw)
        loss = model.loss(tokens, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("variants", nargs="+", choices=VARIANTS)
    for name, default in dict(steps=500, seed=0, length=512, gap=64, batch=8, every=50).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = vars(parser.parse_args())
    for variant in arguments.pop("variants"):
        for line in train(variant, **arguments):
            print(line, flush=True)


if __name__ == "__main__":
    main()
