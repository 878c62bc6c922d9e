#!/bin/bash
# Passes when found.txt names the one file, with or without a leading ./
cd /app || exit 1
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular found.txt || return 1
    local path
    path=$(tr -d '[:space:]' < found.txt)
    [ "${path#./}" = services/api/v2/api.conf ]
}

if passes; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
