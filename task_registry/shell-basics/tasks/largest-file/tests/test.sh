#!/bin/bash
# Passes when size.txt holds the number.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular size.txt || return 1
    [ "$(tr -d '[:space:]' < size.txt)" = 4321 ]
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
