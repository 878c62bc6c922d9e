#!/bin/bash
# Passes when count.txt holds the number and nothing else.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular count.txt || return 1
    [ "$(tr -d '[:space:]' < count.txt)" = 25 ]
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
