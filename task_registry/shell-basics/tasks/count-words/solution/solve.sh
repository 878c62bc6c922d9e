#!/bin/bash
set -e
tr -cs 'A-Za-z' '\n' < story.txt | tr 'A-Z' 'a-z' | grep . | sort -u | wc -l > count.txt
