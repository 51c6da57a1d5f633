# shellcheck shell=bash
# What .ci/run and .ci/nightly share: they source it. A new virtual environment with this checkout installed from the lock
# files, the steps with their times (artifacts/gate_times.jsonl, for python -m tools.gate_times), and clean-up at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d) # the environments, uv's cache
# shellcheck disable=SC2046 # process ids
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$scratch"' EXIT
times=artifacts/gate_times.jsonl
mkdir -p artifacts
rm -f "$times"
ran=()
current_step='' began=0

record_step() {
  if [ -n "$current_step" ]; then
    printf '{"kind": "step", "name": "%s", "wall_s": %s}\n' "$current_step" "$((SECONDS - began))" >>"$times"
  fi
}

step() { # step NAME: ends the step before it
  record_step
  current_step=$1 began=$SECONDS
  ran+=("$1")
  printf '\n== %s (%ss)\n' "$1" "$SECONDS"
}

install_environment() { # install_environment gate|nightly: Debian's packages of that tier are installed in the background
  python3 -m venv "$scratch/venv"
  export CI=true PATH="$scratch/venv/bin:$PATH" VIRTUAL_ENV="$scratch/venv" PIP_DISABLE_PIP_VERSION_CHECK=1
  unset PYTHONPATH
  unset PYTHONDONTWRITEBYTECODE # without byte code a rank takes 22 s of CPU time to start instead of 4
  step "install"
  .ci/install-apt-packages "$1" &
  # shellcheck disable=SC2034 # both wait for it
  packages=$!
  # Versions and hashes of all packages are in .ci/locks (docs/DEPENDENCIES.md): torch's build for CPUs among them, so that
  # nothing can pull one for GPUs. No byte code: most files are never imported.
  pip install --quiet --no-compile --require-hashes --requirement .ci/locks/uv.txt
  # uv installs the rest in half a minute, pip in four. It does not read pip's settings: it is given those of this machine.
  export UV_CACHE_DIR="$scratch/cache" UV_SYSTEM_CERTS=1
  export UV_INDEX_STRATEGY=unsafe-best-match # every index that has the file
  local pair value
  for pair in UV_DEFAULT_INDEX=index-url UV_INDEX=extra-index-url UV_FIND_LINKS=find-links; do
    value=$(pip config get ":env:.${pair#*=}" 2>/dev/null || pip config get "global.${pair#*=}" 2>/dev/null || true)
    if [ -n "$value" ]; then export "${pair%%=*}=$value"; fi
  done
  uv pip install --quiet --require-hashes --build-constraint .ci/locks/build.txt --requirement .ci/locks/gate.txt
  uv pip install --quiet --no-deps --build-constraint .ci/locks/build.txt --editable packages/nsa-attention --editable packages/nsa-train
  export PIP_CONSTRAINT="$PWD/constraints.txt" # of what tests install
}

run_tests() { # run_tests WORDS OF PYTEST
  # Whole files, so that no fixture of a module is set up twice; the longest first, so that none is left for the end.
  # Three processes for two cores: a fifth of what a test takes is waiting for servers, clocks and other processes.
  pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=100 --times="$times" -p no:cacheprovider "$@"
}

finish() { # finish "WHAT THE OTHER TIER RUNS"
  record_step
  python -m tools.gate_times "$times" --top 15
  printf '\nran: %s\nleft to %s\n' "$(printf '%s; ' "${ran[@]}")" "$1"
}
