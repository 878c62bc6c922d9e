#!/bin/bash
set -e
sed -i -e 's/^  "debug": true/  "debug": false/' -e 's/"workers": 2/"workers": 8/' settings.json
