#!/bin/sh
# Starts this SuperNode, and starts it again whenever it ends; Ctrl-C or SIGTERM ends both.
#
# Flower refuses a node that comes back before its old connection has expired, which takes up to 60 s after a crash, and
# a node whose key is not registered, both with exit code 305: so this goes on trying.
set -u
umask 077
cd "$(dirname "$0")" || exit 1
. ./settings.env
if venv/bin/python -c "" 2> /dev/null; then PATH="$PWD/venv/bin:$PATH"; fi # In a container it is that of another machine.
export PATH
export FLWR_HOME="$PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
if ! command -v flower-supernode > /dev/null; then
    echo "start.sh: expected flower-supernode in $PWD/venv/bin or on the PATH, got none; install fedapps as the README says" >&2
    exit 1
fi

child=""
trap 'trap - TERM INT; if [ -n "$child" ]; then kill "$child" 2> /dev/null; wait "$child"; fi; exit 0' TERM INT
while :; do
    flower-supernode --superlink "$SUPERLINK" --root-certificates ca.crt --auth-supernode-private-key node.key \
        --node-config node.toml --port "$RUNTIME_PORT" &
    child=$!
    wait "$child"
    echo "start.sh: the SuperNode has ended; it starts again in 10 s." \
        "If it is refused for more than a minute: fedapps deploy check --folder $PWD" >&2
    sleep 10 &
    child=$!
    wait "$child"
done
