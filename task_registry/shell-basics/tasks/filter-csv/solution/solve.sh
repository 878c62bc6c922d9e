#!/bin/bash
set -e
awk -F, '$2 == "Sales" {print $3 "," $1}' staff.csv | sort -t, -k1,1nr | cut -d, -f2 > sales.txt
