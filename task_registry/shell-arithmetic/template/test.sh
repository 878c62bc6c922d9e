#!/bin/bash
# Passes when answer.txt is a regular file whose one line is the expected number; blanks after it do not matter.
shopt -s extglob
answer=answer.txt
reward=0
if [ -f "$answer" ] && [ ! -L "$answer" ]; then
    # At most 64 bytes are looked at; a zero byte becomes a character that no number has.
    content=$(head -c 64 "$answer" | tr '\0' '?')
    content=${content%%+([[:space:]])}
    [ "$content" = "$(cat "${0%/*}/expected.txt")" ] && reward=1
fi
echo "$reward" > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
