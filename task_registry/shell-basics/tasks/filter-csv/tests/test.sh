#!/bin/bash
# Passes when sales.txt holds the names in order.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular sales.txt || return 1
    cmp -s sales.txt "$tests/expected.txt"
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
