#!/bin/sh
# Registers the keys of all nodes with the SuperLink; those that it knows already stay as they are.
set -u
cd "$(dirname "$0")" || exit 1
if [ -d venv ]; then PATH="$PWD/venv/bin:$PATH"; fi
export PATH FLWR_HOME="$PWD" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
for key in keys/*.pub; do
    name=$(basename "$key" .pub)
    echo "$name:"
    flwr supernode register "$key" @CONNECTION@ --name "$name"
done
