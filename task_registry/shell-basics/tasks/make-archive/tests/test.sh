#!/bin/bash
# Passes when the archive unpacks to exactly the wanted files.
cd /app || exit 1
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    regular backup.tar.gz || return 1
    mkdir /tmp/unpacked && tar -xzf backup.tar.gz -C /tmp/unpacked || return 1
    [ "$(cd /tmp/unpacked && find . ! -type d | LC_ALL=C sort)" = "$(cat /tests/expected.txt)" ] || return 1
    local file
    while read -r file; do
        cmp -s "/tmp/unpacked/$file" "/tests/$file" || return 1
    done < /tests/expected.txt
}

if passes; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
