#!/bin/bash
set -e
awk 'NR == FNR {id = $1; sub(/^[0-9]+ /, ""); name[id] = $0; next}
     {print $1 "\t" ($2 in name ? name[$2] : "unknown")}' customers.txt orders.txt | sort -n > result.txt
