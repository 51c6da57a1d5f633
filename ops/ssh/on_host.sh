#!/usr/bin/env bash
# Remote part of remote.sh, which sends this text to bash on the other machine. Needs bash, tmux and the project with
# its environment there.

set -euo pipefail
action=$1
shift

cd "$REMOTE_DIR"
PATH=$(cd "$REMOTE_VENV/bin" && pwd):$PATH
# The run's log, exit code, process id, and the name of its run folder.
state=$PWD/.remote/$RUN_NAME

say() { echo "remote.sh: $*"; }
running() { tmux has-session -t "=$RUN_NAME" 2>/dev/null; }
run_folder() { cat "$state/run_folder"; }

start() {
  if running; then
    say "$RUN_NAME runs already: status shows it, stop ends it"
    exit 1
  fi
  # Report invalid arguments here, not inside tmux.
  local settings
  settings=$(nsa config show --json "$@")
  if [ "$PREFLIGHT" = 1 ]; then
    nsa preflight --resume "$@"
  fi
  if [ -z "$RANKS" ]; then
    RANKS=$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')
  fi
  mkdir -p "$state"
  rm -f "$state/exit_code" "$state/pid"
  python -c 'import json, sys; print(json.loads(sys.argv[1])["config"]["train"]["out_dir"])' "$settings" \
    >"$state/run_folder"
  {
    printf 'cd %q\nstate=%q\nexport PATH=%q\n' "$PWD" "$state" "$PATH"
    printf 'words=('
    printf ' %q' --nproc "$RANKS" --grace "$GRACE" "$@"
    printf ' )\n'
    cat <<'RUN'
# Ctrl-c and the end of the tmux session reach the launcher, which saves; this shell stays to record its exit code.
trap : INT HUP TERM
{
  echo "$BASHPID" >"$state/pid"
  exec nsa launch --resume "${words[@]}"
} 2>&1 | tee --ignore-interrupts --append "$state/log"
echo "${PIPESTATUS[0]}" >"$state/exit_code"
RUN
  } >"$state/run.sh"
  tmux new-session -d -s "$RUN_NAME" "exec bash $(printf %q "$state/run.sh")"
  say "started $RUN_NAME, ranks: $RANKS, run folder: $(run_folder)"
}

status() {
  local code=0
  if running; then
    say "$RUN_NAME is running"
  elif [ -f "$state/exit_code" ]; then
    code=$(cat "$state/exit_code")
    say "$RUN_NAME ended with $code"
  else
    code=1
    say "$RUN_NAME is gone without an exit code: killed, or the machine restarted. Resume with start"
  fi
  tail -n 5 "$state/log" 2>/dev/null || true
  tail -n 1 "$(run_folder)/heartbeat_rank0.jsonl" 2>/dev/null || say "no heartbeat yet"
  exit "$code"
}

stop() {
  if running; then
    kill -TERM "$(cat "$state/pid")"
    say "stopping $RUN_NAME: it saves and exits"
    # The launcher kills the ranks after GRACE; if it still runs a minute later, give up.
    for ((i = 0; i < (GRACE + 60) * 5; i++)); do
      running || break
      sleep 0.2
    done
    if running; then
      say "$RUN_NAME is still running: see attach"
      exit 1
    fi
  fi
  status
}

tensorboard_here() {
  exec tensorboard --logdir "$(run_folder)/tb" --host 127.0.0.1 --port "$REMOTE_PORT"
}

if [ "$action" != start ] && [ ! -f "$state/run_folder" ]; then
  say "$RUN_NAME was never started in $PWD"
  exit 1
fi
"$action" "$@"
