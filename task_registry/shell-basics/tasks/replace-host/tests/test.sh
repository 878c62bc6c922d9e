#!/bin/bash
# Passes when every file is exactly what was asked for.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    local file
    for file in app.conf mail/relay.conf app.conf.bak plain.conf; do
        regular "etc/$file" && cmp -s "etc/$file" "$tests/expected/$file" || return 1
    done
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
