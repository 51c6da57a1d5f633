"""Time and error of the chunked loss in bf16, beside logits that are rounded to bf16: `python -m tools.bench_loss`.

The other way is what most heads do: a product in bf16, whose result is converted to fp32 for the softmax, in chunks of
the same size and with gradients in bf16. Errors are those against fp64 on the same inputs: of the mean loss, of the
losses of single tokens, and of the gradients (relative, Frobenius norm). `--scale` is the standard deviation of the
logits. CPU times of one thread; both ways take turns. On a GPU pass `--device cuda`.

n tokens of one chunk · N tokens · D model dim · V vocabulary
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.model.loss import chunk_rows, linear_cross_entropy, linear_token_scores

Outcome = tuple[Tensor, Tensor, Tensor]


def rounded(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Outcome:
    """Token losses and gradients of their mean, from logits in the dtype of the inputs."""
    losses, dx_ND, dweight_VD = [], torch.empty_like(x_ND), torch.zeros_like(weight_VD, dtype=torch.float32)
    rows = chunk_rows(len(weight_VD))
    for begin in range(0, len(x_ND), rows):
        at = slice(begin, begin + rows)
        logits_nV = (x_ND[at] @ weight_VD.T).float()
        losses.append(F.cross_entropy(logits_nV, labels_N[at], reduction="none"))
        dlogits_nV = logits_nV.softmax(-1)
        dlogits_nV[torch.arange(len(dlogits_nV)), labels_N[at]] -= 1
        dlogits_nV = dlogits_nV.div_(len(x_ND)).to(x_ND.dtype)
        dx_ND[at] = dlogits_nV @ weight_VD
        dweight_VD += dlogits_nV.T @ x_ND[at]
    return torch.cat(losses), dx_ND, dweight_VD.to(weight_VD.dtype)


def exact(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Outcome:
    """Compute losses and gradients in fp64."""
    x, weight = x_ND.double().requires_grad_(), weight_VD.double().requires_grad_()
    losses = []
    for begin in range(0, len(x), 256):
        losses.append(
            F.cross_entropy(x[begin : begin + 256] @ weight.T, labels_N[begin : begin + 256], reduction="none")
        )
        (losses[-1].sum() / len(x)).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return torch.cat(losses).detach(), x.grad, weight.grad


def ours(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = x_ND.requires_grad_(), weight_VD.requires_grad_()
    return torch.autograd.grad(linear_cross_entropy(x, weight, labels_N), (x, weight))  # type: ignore[return-value]


def describe(name: str, losses: Tensor, gradients: tuple[Tensor, Tensor], truth: Outcome) -> str:
    mean = float((losses.double().mean() - truth[0].mean()).abs())
    single = float((losses.double() - truth[0]).abs().max())
    dx, dweight = (float((a.double() - b).norm() / b.norm()) for a, b in zip(gradients, truth[1:], strict=True))
    return f"{name:>8}  mean loss {mean:.1e}  one token {single:.1e}  dx {dx:.2e}  dweight {dweight:.2e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--scale", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x_ND = torch.randn(args.tokens, args.dim).to(args.device, torch.bfloat16)
    weight_VD = (torch.randn(args.vocab, args.dim) * args.scale / args.dim**0.5).to(args.device, torch.bfloat16)
    logits = (x_ND.float() @ weight_VD.float().T).topk(2).indices  # a model that is nearly right
    labels_N = logits[:, 1].clone()
    inputs = x_ND, weight_VD, labels_N
    truth = exact(*inputs)
    losses, *gradients = rounded(*inputs)
    print(f"{args.tokens} tokens x {args.dim} x {args.vocab} ids, bf16, logits with standard deviation {args.scale:g}; "
          f"mean loss {float(truth[0].mean()):.4f}; torch {torch.__version__}, {args.device}")  # fmt: skip
    best = tuple(value.bfloat16() for value in truth[1:])
    print(describe("fp64", truth[0], best, truth), "  (gradients rounded once)")  # type: ignore[arg-type]
    print(describe("rounded", losses, (gradients[0], gradients[1]), truth))
    print(describe("ours", linear_token_scores(*inputs).losses, ours(*inputs), truth))
    times: dict[str, list[float]] = {"rounded": [], "ours": []}
    for _ in range(args.rounds):
        for name, function in (("rounded", rounded), ("ours", ours)):
            began = time.process_time() if args.device == "cpu" else time.perf_counter()
            function(*inputs)
            if args.device != "cpu":
                torch.cuda.synchronize()
            ended = time.process_time() if args.device == "cpu" else time.perf_counter()
            times[name].append(ended - began)
    for name, seconds in times.items():
        print(f"{name:>8}  {min(seconds):.2f} s, rounds {' '.join(f'{each:.2f}' for each in seconds)}")
    print(f"   ratio  {min(times['ours']) / min(times['rounded']):.2f}")


if __name__ == "__main__":
    main()
