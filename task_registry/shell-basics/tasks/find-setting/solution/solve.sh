#!/bin/bash
set -e
grep -rlE '^port = 8443$' --include='*.conf' services > found.txt
