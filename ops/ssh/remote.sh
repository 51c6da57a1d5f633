#!/usr/bin/env bash
# Runs training on another machine over ssh, inside tmux there, so that it survives a lost connection.
#
#   ops/ssh/remote.sh start  HOST CONFIG [KEY=VALUE ...]   start, or resume from the newest checkpoint
#   ops/ssh/remote.sh status HOST                          running or its exit code, last log lines, last heartbeat
#   ops/ssh/remote.sh attach HOST                          its terminal; Ctrl-b d detaches, Ctrl-c stops the run
#   ops/ssh/remote.sh stop   HOST                          save a checkpoint and exit; waits for it
#   ops/ssh/remote.sh tunnel HOST [PORT]                   its TensorBoard at http://127.0.0.1:PORT of this machine
#
# HOST is any ssh destination; set user, port, key and jump host in ~/.ssh/config.
# `stop`, and `status` of a run that has ended, return its exit code: 0 done, 10 saved and resumable, 11 halted, ...
# If systemd on the other machine ends your processes at logout (KillUserProcesses=yes), run `loginctl enable-linger` once.

set -euo pipefail

# On the other machine: the project's folder, absolute or relative to the home folder.
REMOTE_DIR=${REMOTE_DIR:-nsa-train}
# Its virtual environment, absolute or relative to REMOTE_DIR.
REMOTE_VENV=${REMOTE_VENV:-.venv}
# A unique word for each run on that machine: name of the tmux session and of the folder of its log and exit code.
RUN_NAME=${RUN_NAME:-nsa}
# Ranks; empty starts one per GPU.
RANKS=${RANKS:-}
# Seconds for the ranks to save and exit.
GRACE=${GRACE:-300}
# 0 skips the checks before a start.
PREFLIGHT=${PREFLIGHT:-1}
# TensorBoard's port on the loopback of the other machine.
REMOTE_PORT=${REMOTE_PORT:-6006}
# More options for ssh, e.g. "-F my_ssh_config".
SSH_OPTIONS=${SSH_OPTIONS:-}

if [ $# -lt 2 ]; then
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
  exit 2
fi
action=$1 host=$2
shift 2
read -ra options <<<"$SSH_OPTIONS"
# A dead connection is noticed within a minute, not after hours.
options+=(-o ServerAliveInterval=15 -o ServerAliveCountMax=4)

# The remote command: on_host.sh with the settings above and the given arguments. Quoted twice: ssh joins its
# arguments with blanks, and the remote shell splits them again.
on_host() {
  local name
  for name in REMOTE_DIR REMOTE_VENV RUN_NAME RANKS GRACE PREFLIGHT REMOTE_PORT; do
    printf '%s=%q ' "$name" "${!name}"
  done
  printf 'exec bash -c %q on_host.sh' "$(cat "$(dirname "$0")/on_host.sh")"
  printf ' %q' "$@"
}

# shellcheck disable=SC2029 # expanded here on purpose: on_host has quoted it
case $action in
start)
  if [ $# -eq 0 ]; then
    echo "remote.sh: start needs a config: remote.sh start HOST CONFIG [KEY=VALUE ...]"
    exit 2
  fi
  ssh "${options[@]}" "$host" "$(on_host start "$@")"
  ;;
status | stop) ssh "${options[@]}" "$host" "$(on_host "$action")" ;;
attach) ssh -t "${options[@]}" "$host" "tmux attach-session -t $(printf %q "=$RUN_NAME")" ;;
tunnel)
  # LocalForward, from loopback to loopback; -tt makes TensorBoard end together with the connection.
  port=${1:-6006}
  echo "remote.sh: http://127.0.0.1:$port shows the run; Ctrl-c closes the tunnel"
  ssh -tt "${options[@]}" -o ExitOnForwardFailure=yes -L "127.0.0.1:$port:127.0.0.1:$REMOTE_PORT" "$host" \
    "$(on_host tensorboard_here)"
  ;;
*)
  echo "remote.sh: unknown action $action; use start, status, attach, stop or tunnel"
  exit 2
  ;;
esac
