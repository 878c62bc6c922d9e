#!/bin/bash
# Passes when every mode and every content is right.
tests=${0%/*}
regular() { [ -f "$1" ] && [ ! -L "$1" ]; }

passes() {
    local modes
    modes=$(cd deploy && stat -c '%a %n' start.sh tools/check.sh README secrets secrets/token secrets/key) || return 1
    [ "$modes" = "$(cat "$tests/expected.txt")" ] || return 1
    [ "$(cat deploy/start.sh deploy/README deploy/secrets/token)" = $'#!/bin/bash\necho start\nHow to deploy.\nabc' ]
}

if passes; then echo 1; else echo 0; fi > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
