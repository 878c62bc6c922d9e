#!/bin/bash
echo check
