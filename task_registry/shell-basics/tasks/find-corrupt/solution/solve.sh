#!/bin/bash
set -e
(cd download && sha256sum -c ../SHA256SUMS 2> /dev/null || true) | awk -F: '/FAILED/ {print $1}' > corrupt.txt
