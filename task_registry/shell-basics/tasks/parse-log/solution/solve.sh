#!/bin/bash
set -e
awk '$9 ~ /^5[0-9][0-9]$/ {n[$7]++} END {for (p in n) print n[p], p}' access.log | sort -rn | head -1 | awk '{print $2, $1}' > worst.txt
