#!/bin/bash
set -e
sed -i -e 's/= region \] then/= region ]; then/' -e 's/sum=$((q1 + q2)$/sum=$((q1 + q2))/' -e 's/total = /total=/' report.sh
bash report.sh > report.txt
