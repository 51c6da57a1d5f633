"""Decode beside dense attention: `python bench/bench_decode.py --help`. The same as `nsa bench decode`."""

import sys

from nsa_train.cli.main import main

sys.argv[1:1] = ["bench", "decode"]
main()
