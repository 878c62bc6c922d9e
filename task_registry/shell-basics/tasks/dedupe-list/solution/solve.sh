#!/bin/bash
set -e
awk '!seen[tolower($0)]++' subscribers.txt > unique.txt
mv unique.txt subscribers.txt
