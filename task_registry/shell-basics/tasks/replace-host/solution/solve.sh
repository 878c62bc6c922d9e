#!/bin/bash
set -e
find etc -name '*.conf' -exec sed -i -E 's/(^|[^A-Za-z0-9.-])old\.example\.com($|[^A-Za-z0-9.-])/\1new.example.com\2/g' {} +
