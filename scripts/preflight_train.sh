#!/usr/bin/env bash
# Judge the run that CONFIG names before it begins; exit code 2 if any rule is broken. The same as `nsa preflight`.
set -euo pipefail
exec nsa preflight "${CONFIG:-configs/train_50k.yaml}" "$@"
