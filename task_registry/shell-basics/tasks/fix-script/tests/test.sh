#!/bin/bash
# Passes when report.txt is right and report.sh is a valid script that still reads sales.csv. It is never run here.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular report.txt && regular report.sh || return 1
    bash -n report.sh || return 1
    grep -q 'sales.csv' report.sh && grep -q 'while IFS=, read' report.sh || return 1
    cmp -s report.txt "$tests/expected.txt"
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
