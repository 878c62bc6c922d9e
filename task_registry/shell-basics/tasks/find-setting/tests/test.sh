#!/bin/bash
# Passes when found.txt names the one file, with or without a leading ./
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular found.txt || return 1
    local path
    path=$(tr -d '[:space:]' < found.txt)
    [ "${path#./}" = services/api/v2/api.conf ]
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
