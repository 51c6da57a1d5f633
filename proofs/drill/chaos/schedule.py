"""Plan of a chaos drill: from a seed and a duration to faults, their steps and victims. Pure: same seed, same plan.

A fault is due at a step, not at a time, so that a slow machine plays the same faults at the same places. Some are
followed by a second one while the run still recovers: a few seconds after the first was reported.
"""

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nsa.errors import ConfigError
from proofs.drill.chaos.fault_classes import PROFILES, ChaosFault

LEAST_S, LONG_S = 120.0, 1800.0
GOODPUT = 0.85
"""Required of runs of LONG_S or more; in shorter ones the faults are too close together."""
RANKS = 2
_SPACING_S, _LONG_SPACING_S = 50.0, 220.0
_PACE_S, _LONG_PACE_S = 0.5, 1.0
_SAVE_S = 10.0
_FIRST_START_S = 25.0
_PAIR_EVERY, _LONG_PAIR_EVERY = 4, 8
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class PlannedFault:
    number: int
    fault: ChaosFault
    step: int
    """Played when the run has reached this step."""
    victim: int
    """Rank or node."""
    variant: str = ""
    after_s: float | None = None
    """Seconds after the first fault of a pair was reported, instead of a step, for its second."""


@dataclass(frozen=True)
class ChaosPlan:
    seed: int
    duration_s: float
    pace_s: float
    """Least duration of a step."""
    steps: int
    save_every: int
    faults: tuple[PlannedFault, ...]
    not_played: Mapping[ChaosFault, str]
    """Classes that cannot be played here, and why."""

    @property
    def required_goodput(self) -> float | None:
        return GOODPUT if self.duration_s >= LONG_S else None


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `5m`, `1h` or `1h30m`."""
    if re.fullmatch(r"(\d{1,5}[hms])+", text) is None:
        raise ConfigError(f"--chaos {text!r} is not a duration. Write e.g. 5m, 1h or 1h30m.")
    seconds = sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([hms])", text))
    if seconds < LEAST_S:
        raise ConfigError(f"--chaos {text} is too short for a run with faults: at least {LEAST_S / 60:.0f}m.")
    return seconds


def make_plan(seed: int, duration_s: float, not_played: Mapping[ChaosFault, str] | None = None) -> ChaosPlan:
    """Every class that can be played comes up before one is repeated."""
    chance, missing = random.Random(seed), dict(not_played or {})
    long = duration_s >= LONG_S
    pace_s = _LONG_PACE_S if long else _PACE_S
    save_every = round(_SAVE_S / pace_s)
    count = max(3, int((duration_s - _FIRST_START_S) / (_LONG_SPACING_S if long else _SPACING_S)))
    playable = [fault for fault in ChaosFault if fault not in missing]
    slots = _deal(chance, playable, count, pairs=count // (_LONG_PAIR_EVERY if long else _PAIR_EVERY))
    lost_s = _FIRST_START_S + sum(PROFILES[fault].cost_s for slot in slots for fault in slot)
    gap = max(3, math.ceil((duration_s - lost_s) / pace_s / save_every / (len(slots) + 1)))  # in save intervals
    planned: list[PlannedFault] = []
    for number, slot in enumerate(slots):
        # Not beside a save, where the watchdog allows a longer silence.
        step = (number + 1) * gap * save_every + chance.randrange(3, save_every - 3)
        for place, fault in enumerate(slot):
            profile = PROFILES[fault]
            variant, victim = chance.choice(profile.variants), chance.randrange(profile.lowest_victim, RANKS)
            after_s = round(chance.uniform(1.0, 12.0), 1) if place else None
            planned.append(PlannedFault(len(planned), fault, step, victim, variant, after_s))
    steps = (len(slots) + 1) * gap * save_every
    return ChaosPlan(seed, duration_s, pace_s, steps, save_every, tuple(planned), missing)


def _deal(chance: random.Random, classes: list[ChaosFault], count: int, pairs: int) -> list[list[ChaosFault]]:
    """`count` faults: the classes in random order, over and over. Some follow another one instead of coming alone."""
    deck: list[ChaosFault] = []
    while len(deck) < count:
        shuffled = list(classes)
        chance.shuffle(shuffled)
        deck += shuffled
    slots = [[fault] for fault in deck[:count]]
    for _ in range(pairs):
        following = [slot for slot in slots if len(slot) == 1 and PROFILES[slot[0]].may_follow]
        if not following:
            break
        second = chance.choice(following)
        firsts = [slot for slot in slots if slot is not second and _may_be_followed(slot)]
        if firsts:
            slots.remove(second)
            chance.choice(firsts).extend(second)
    return slots


def _may_be_followed(slot: list[ChaosFault]) -> bool:
    return len(slot) == 1 and PROFILES[slot[0]].may_be_followed
