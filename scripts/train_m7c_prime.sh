#!/usr/bin/env bash
# Train the 125M model on all GPUs here, with the config that fits their memory. The same as `nsa launch`.
set -euo pipefail
mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | sort -n | head -n 1)
size=24g
[ "$mib" -lt 39000 ] || size=40g
[ "$mib" -lt 78000 ] || size=80g
exec nsa launch --nproc "$(nvidia-smi -L | wc -l)" "${CONFIG:-configs/m7c_125m_$size.yaml}" "$@"
