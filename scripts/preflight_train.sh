#!/usr/bin/env bash
# Check the run that CONFIG names before it starts; exit code 2 if a rule is broken. The same as `nsa preflight`.
set -euo pipefail
exec nsa preflight "${CONFIG:-configs/train_50k.yaml}" "$@"
