"""The animation of the monitor shows a recorded run moment by moment."""

import re
from pathlib import Path

from rich.text import Text

from nsa_train.watch.view.monitor_frame import frame
from tools.docs import draw_monitor_replay as replay

RUN = Path(__file__).parents[2] / "nsa_train/record/fixtures/run"
STAY = re.compile(r"@keyframes s(\d+)\{0%\{visibility:visible\}([\d.]+)%\{visibility:hidden\}\}")
GROUP = re.compile(
    r'<g( visibility="hidden")? style="animation:s(\d+) ([\d.]+)s (-[\d.]+)s step-end infinite">(.*?)</g>'
)


def test_a_moment_shows_what_was_written_until_then(tmp_path):
    times = replay.moments(RUN, 3)
    assert times == sorted(times)
    shown = [replay.snapshot_at(RUN, moment, tmp_path / str(i) / RUN.name) for i, moment in enumerate(times)]
    steps = [snapshot.summary.step for snapshot in shown]
    assert steps[0] < steps[-1]
    assert all(event.ts <= times[0] for event in shown[0].run.events)
    assert shown[0].state not in ("gone", "hung")
    assert RUN.name in frame(shown[0], 80, 24)[0].plain


def visible(svg: str, second: float) -> set[str]:
    """Words of the groups that are visible at a time."""
    share = {int(stay): float(percent) for stay, percent in STAY.findall(svg)}
    return {
        word
        for _, stay, period, delay, parts in GROUP.findall(svg)
        if (second - float(delay)) % float(period) / float(period) * 100 < share[int(stay)]
        for word in re.findall(r">([^<]+)</text>", parts)
    }


def test_each_frame_has_its_time_and_the_last_one_stays_without_animation():
    frames = [[Text(f"frame{i}"), Text("always"), Text("late" if i > 1 else "early")] for i in range(4)]
    svg = replay.replay_svg(frames, 20)
    assert svg.count(">always<") == svg.count(">early<") == svg.count(">late<") == 1
    for i in range(4):
        middle = (i + 0.5) * replay.FRAME_S
        assert visible(svg, middle) == {f"frame{i}", "late" if i > 1 else "early"}
    assert visible(svg, (3 + replay.HOLD_FRAMES - 0.5) * replay.FRAME_S) == {"frame3", "late"}
    still = {word for hidden, *_, parts in GROUP.findall(svg) if not hidden for word in re.findall(r">([^<]+)<", parts)}
    assert still == {"frame3", "late"}
