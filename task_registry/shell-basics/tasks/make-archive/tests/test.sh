#!/bin/bash
# Passes when the archive unpacks to exactly the wanted files.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular backup.tar.gz || return 1
    local unpacked
    unpacked=$(mktemp -d) && tar -xzf backup.tar.gz -C "$unpacked" || return 1
    [ "$(cd "$unpacked" && find . ! -type d | LC_ALL=C sort)" = "$(cat "$tests/expected.txt")" ] || return 1
    local file
    while read -r file; do
        cmp -s "$unpacked/$file" "$tests/$file" || return 1
    done < "$tests/expected.txt"
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
