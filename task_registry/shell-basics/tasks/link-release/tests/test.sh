#!/bin/bash
# Passes when the link is relative and leads to the highest version (1.10 is above 1.9; a release is above its rc).
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    [ -L current ] || return 1
    local target
    target=$(readlink current)
    target=${target#./}
    [ "${target%/}" = releases/v1.10.0 ] && grep -qx v1.10.0 current/VERSION
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
