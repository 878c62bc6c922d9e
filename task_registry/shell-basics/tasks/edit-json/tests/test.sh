#!/bin/bash
# Passes when the file, its white space aside, is what was asked for. The inner debug is another key and stays.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular settings.json || return 1
    [ "$(tr -d '[:space:]' < settings.json)" = "$(tr -d '[:space:]' < "$tests/expected.json")" ]
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
