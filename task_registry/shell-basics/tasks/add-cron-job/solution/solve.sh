#!/bin/bash
set -e
echo '30 3 * * 1 /usr/local/bin/backup --full' >> crontab.txt
