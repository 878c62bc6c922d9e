#!/bin/bash
set -e
for photo in photos/*.jpeg photos/*.JPG; do
    mv -- "$photo" "${photo%.*}.jpg"
done
