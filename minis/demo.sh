#!/usr/bin/env bash
# The mini model on two ranks: start, ask over HTTP, show what the engine says and its map, stop. On a terminal the server
# stays until Enter, so that its page can be looked at.
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
printf '\nWhat just happened, an expert a sign:\n\n'
"$tidectl" top --once
url=$("$tidectl" status --json | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["url"])')
printf '\nThe same as a page, live: %s/expert-map\n' "$url"
if [ -t 0 ] && [ -t 1 ]; then
  read -r -p 'Enter stops the server. '
fi
