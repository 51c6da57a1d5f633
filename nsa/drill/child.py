"""Runs `python -m MODULE WORD …` for a drill: `python -m nsa.drill.child DRILL_PID MODULE WORD …`.

The kernel kills it when the thread of the drill that started it ends, so that a killed drill leaves no run behind.
"""

import os
import sys

from nsa.train.launch.agent import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))  # survives exec
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])
