"""Prefill beside dense attention: `python bench/bench_prefill.py --help`. The same as `nsa bench prefill`."""

import sys

from nsa_train.cli.main import main

sys.argv[1:1] = ["bench", "prefill"]
main()
