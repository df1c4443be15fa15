#!/bin/sh
# Starts the SuperLink. It keeps runs and registered keys in superlink.db, and ServerApps keep their results in runs/.
set -eu
umask 077
cd "$(dirname "$0")"
. ./settings.env
if venv/bin/python -c "" 2> /dev/null; then PATH="$PWD/venv/bin:$PATH"; fi # In a container it is that of another machine.
export PATH
export FLWR_HOME="$PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 FEDAPPS_RUNS="$PWD/runs"
if ! command -v flower-superlink > /dev/null; then
    echo "start.sh: expected flower-superlink in $PWD/venv/bin or on the PATH, got none; install fedapps as the README says" >&2
    exit 1
fi
exec flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \
    --enable-supernode-auth --database superlink.db --disable-runtime-dependency-installation \
    --host "$LISTEN" --port "$PORT"
