#!/usr/bin/env bash
# The mini model on two ranks: start, ask over HTTP, show what the engine says, stop.
set -euo pipefail
cd "$(dirname "$0")/.."
export TIDE_STATE_DIR=${TIDE_STATE_DIR:-$PWD/build/demo}
tidectl=.venv/bin/tidectl
"$tidectl" start mini-deepseek
trap '"$tidectl" stop' EXIT
for question in "${QUESTION:-Tell me about Japan.}" "What is the capital of Norway?"; do
  printf '\n> %s\n' "$question"
  "$tidectl" chat --temperature 0 "$question"
done
printf '\n'
"$tidectl" status
