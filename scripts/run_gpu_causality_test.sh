#!/usr/bin/env bash
# Check the kernels on this machine's GPU; --full adds the benchmark, --rehearse needs none. The same as `nsa gpu-check`.
set -euo pipefail
cd "$(dirname "$0")/.."
exec nsa gpu-check "$@"
