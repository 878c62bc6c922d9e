#!/bin/bash
# Passes when worst.txt is the one line expected.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular worst.txt || return 1
    [ "$(awk '{$1 = $1; print}' worst.txt)" = "$(cat "$tests/expected.txt")" ]
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
