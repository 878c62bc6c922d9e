#!/bin/bash
set -e
find data -type f -printf '%s\n' | sort -n | tail -1 > size.txt
