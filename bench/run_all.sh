#!/usr/bin/env bash
# Every benchmark of attention on this machine, into bench/results. Run it on an idle machine: hours on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-bench/results}
mkdir -p "$out"

record() { # name, then the words of the command
  local name=$1
  shift
  nsa bench "$@" --json "$out/$name.json" --markdown "$out/$name.md"
}

nsa bench machine --json "$out/machine.json"
record attention_base attention --lengths 2k,4k,8k,16k,32k,64k --budget-s 480 --plot "$out/attention_base.svg" # 3 rounds at 64k
record attention_smooth attention --lengths 4k,16k,64k --data smooth --no-peers
record attention_gqa16 attention --lengths 2k,4k,8k,16k,32k --shape gqa16 --no-peers
record prefill_base prefill --lengths 4k,16k,64k --plot "$out/prefill_base.svg"
record decode_base decode --lengths 2k,4k,8k,16k,32k,64k --plot "$out/decode_base.svg"
record train_125m train
record memory_base memory --lengths 4k,8k,16k,32k,64k,128k --dtype fp32,bf16
