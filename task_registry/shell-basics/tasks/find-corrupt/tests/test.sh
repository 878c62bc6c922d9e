#!/bin/bash
# Passes when corrupt.txt names the damaged file.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular corrupt.txt || return 1
    [ "$(tr -d '[:space:]' < corrupt.txt)" = part-d.dat ]
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
