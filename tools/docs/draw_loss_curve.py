"""Draw the loss of a run: python -m tools.docs.draw_loss_curve nsa-demo/run docs/quickstart_curve.svg"""

import csv
import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 280, 52, 32, 18, 58
Points = list[tuple[float, float]]


def column(path: Path, name: str) -> Points:
    with path.open() as file:
        return [(float(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]


def ticks(steps: float) -> list[int]:
    """Round step numbers for the axis: three to seven of them, 0 first."""
    size = 10 ** max(len(str(int(steps))) - 1, 0)
    spacing = next(
        part for part in (2 * size, size, size // 2, size // 5, 1) if (part and steps >= 3 * part) or part == 1
    )
    return list(range(0, int(steps) + 1, spacing))


def main() -> None:
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    train, held_out = column(run / "training.csv", "loss"), column(run / "val.csv", "val_loss")
    steps = train[-1][0]
    losses = [loss for _, loss in [*train, *held_out]]
    low, high = math.floor(2 * min(losses) - 1) / 2, max(losses)  # room for the numbers below the dots
    tokenizer = json.loads((run / "env.json").read_text())["tokenizer"]
    unit = "byte" if tokenizer is not None and tokenizer["name"] == "byte" else "token"

    def at(point: tuple[float, float]) -> tuple[float, float]:
        step, loss = point
        return (
            LEFT + step / steps * (WIDTH - LEFT - RIGHT),
            TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM),
        )

    parts = []
    for level in range(math.ceil(low), math.floor(high) + 1):
        y = at((0, level))[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#8884"/><text x="{LEFT - 8}" y="{y + 4:.1f}" '
                     f'text-anchor="end">{level}</text>')  # fmt: skip
    bottom = HEIGHT - BOTTOM
    parts.append(f'<path d="M{LEFT} {bottom}H{WIDTH - RIGHT}" stroke="#888"/>')
    for tick in ticks(steps):
        x = at((tick, low))[0]
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#888"/><text x="{x:.1f}" y="{bottom + 20}" '
                     f'text-anchor="middle">{tick}</text>')  # fmt: skip
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, train))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#3b6ea8" stroke-width="2"/>')
    for point in held_out:
        x, y = at(point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#d98032"/>'
                     f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{point[1]:.2f}</text>')  # fmt: skip
    caption = f"loss in nats per {unit} over steps · line: training · dots: held-out"
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{caption}</text>')
    style = "<style>text{font:13px sans-serif;fill:#888}</style>"
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">{style}{"".join(parts)}</svg>'
    )
    print(f"wrote {out}: held-out {held_out[-1][1]:.3f} nats per {unit} at step {held_out[-1][0]:.0f}")


if __name__ == "__main__":
    main()
