#!/bin/bash
# Passes when result.txt is the expected table.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular result.txt || return 1
    cmp -s result.txt "$tests/expected.txt"
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
