#!/bin/bash
# Passes when the folder holds exactly the expected names, each with its own content.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    local listing
    listing=$(cd photos && find . -type f | LC_ALL=C sort) || return 1
    [ "$listing" = "$(cat "$tests/expected.txt")" ] || return 1
    [ "$(cat photos/beach.jpg 'photos/old town.jpg' photos/IMG_0042.jpg photos/cat.jpg)" = $'beach\nold town\nimg 42\ncat' ] &&
        grep -qx 'rename the .jpeg files' photos/notes.txt
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
