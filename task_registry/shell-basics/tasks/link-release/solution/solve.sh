#!/bin/bash
set -e
ln -s releases/v1.10.0 current
