#!/bin/bash
# Passes when the file is the expected one.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular subscribers.txt || return 1
    cmp -s subscribers.txt "$tests/expected.txt"
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
