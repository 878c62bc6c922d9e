#!/bin/bash
set -e
find deploy -type f -exec chmod 644 {} +
find deploy -name '*.sh' -exec chmod 755 {} +
chmod 600 deploy/secrets/*
chmod 700 deploy/secrets
