#!/bin/bash
# Passes when exactly one line was added and it is the job, Monday written as 1, Mon or mon.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular crontab.txt || return 1
    [ "$(grep -c . crontab.txt)" = 4 ] || return 1
    [ "$(grep -vE 'backup' crontab.txt | grep .)" = "$(cat "$tests/original.txt")" ] || return 1
    grep -qiE '^30[[:space:]]+0?3[[:space:]]+\*[[:space:]]+\*[[:space:]]+(1|mon)[[:space:]]+/usr/local/bin/backup --full[[:space:]]*$' crontab.txt
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
