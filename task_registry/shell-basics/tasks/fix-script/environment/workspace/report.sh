#!/bin/bash
# Sums two quarters a region.
total=0
while IFS=, read -r region q1 q2; do
    if [ "$region" = region ] then
        continue
    fi
    sum=$((q1 + q2)
    echo "$region $sum"
    total = $((total + sum))
done < sales.csv
echo "total $total"
