"""Draw the monitor of a recorded run as an animation: python -m tools.docs.draw_monitor_replay RUN OUT.svg

Each frame is what `nsa monitor` shows at one moment of the run: the records written until then are copied into a folder
and read with a clock set to that moment. Lines that do not change between frames are drawn once.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from rich.text import Text

from nsa_train import names
from nsa_train.record.heartbeat_record import heartbeat_files
from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.health import examine
from nsa_train.watch.run_reader import ClockReading, RunReader
from nsa_train.watch.status import phase
from nsa_train.watch.view.monitor_frame import frame
from nsa_train.watch.view.summary import RunSnapshot, summarize
from tools.docs.draw_views import screen_size, svg_document, svg_line

WIDTH, HEIGHT = 80, 24
FRAMES, FRAME_S, HOLD_FRAMES = 12, 0.6, 5
"""Frames in all, seconds for each, and how many frames long the last one stays."""


def snapshot_at(run: Path, moment: float, copy: Path) -> RunSnapshot:
    """Read the records of a run up to a moment, which are copied into a folder that keeps the run's name."""
    copy.mkdir(parents=True)
    for record in (path for _, path in heartbeat_files(run)):
        _copy_until(record, copy / record.name, moment)
    for name in (names.EVENTS, names.VAL_CSV):
        if (run / name).exists():
            _copy_until(run / name, copy / name, moment)
    (copy / names.ENV).write_bytes((run / names.ENV).read_bytes())
    # Of another host, so that the processes of the run, which have ended, are not looked for.
    with closing(RunReader(copy, lambda: ClockReading(moment, moment), host="replay", whole=True)) as reader:
        history = reader.update()
        findings = examine(history, now=moment, limits=HealthLimits())
        return RunSnapshot(reader.data, summarize(reader.data), str(phase(history, findings)), findings, moment)


def moments(run: Path, count: int) -> list[float]:
    """Times of heartbeats spread evenly over a run, the last one at its end."""
    beats = [json.loads(line)["ts"] for line in (run / names.heartbeat(0)).read_text(encoding="utf-8").splitlines()]
    return [beats[round(i * (len(beats) - 1) / count)] for i in range(1, count + 1)]


def replay_svg(frames: Sequence[Sequence[Text]], width: int) -> str:
    """One picture in which frames follow each other; without animation it shows the last of them."""
    shown = len(frames) + HOLD_FRAMES - 1
    period = shown * FRAME_S
    groups, lengths = [], set()
    for row in range(len(frames[0])):
        lines = [svg_line(each[row], row, width) for each in frames]
        for start, end, parts in _spans(lines):
            stay = end - start + (HOLD_FRAMES - 1 if end == len(frames) else 0)
            if not parts or stay == shown:
                groups.append(parts)
                continue
            lengths.add(stay)
            begin = f"animation:s{stay} {period}s {start * FRAME_S - period}s step-end infinite"
            hidden = "" if end == len(frames) else ' visibility="hidden"'
            groups.append(f'<g{hidden} style="{begin}">{parts}</g>')
    rules = [
        f"@keyframes s{stay}{{0%{{visibility:visible}}{100 * stay / shown:.3f}%{{visibility:hidden}}}}"
        for stay in sorted(lengths)
    ]
    still = "@media(prefers-reduced-motion:reduce){g{animation:none!important}}"
    return svg_document("".join(groups), *screen_size(width, len(frames[0])), css="".join([*rules, still]))


def _spans(lines: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Runs of equal lines: first frame, frame after the last, line."""
    start = 0
    for i in range(1, len(lines) + 1):
        if i == len(lines) or lines[i] != lines[start]:
            yield start, i, lines[start]
            start = i


def _copy_until(source: Path, copy: Path, moment: float) -> None:
    """Copy the lines of a record that were written up to a moment; CSV files name the time in a column `ts`."""
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    if source.suffix == ".csv":
        column = lines[0].rstrip().split(",").index("ts")
        copied_lines = lines[:1] + [line for line in lines[1:] if float(line.rstrip().split(",")[column]) <= moment]
    else:
        copied_lines = [line for line in lines if json.loads(line)["ts"] <= moment]
    copy.write_text("".join(copied_lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--frames", type=int, default=FRAMES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        frames = [
            frame(snapshot_at(args.run, moment, Path(folder, str(i), args.run.name)), WIDTH, HEIGHT)
            for i, moment in enumerate(moments(args.run, args.frames))
        ]
    args.out.write_text(replay_svg(frames, WIDTH), encoding="utf-8")
    print(f"wrote {args.out} ({args.out.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
