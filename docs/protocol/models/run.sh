#!/usr/bin/env bash
# Builds the models into a temporary directory and plays their variants; ends non-zero when one comes out otherwise than
# its table says.
#
#   run.sh [--states-max N] [MODEL...]     all models, or these; only variants that take at most N states
#
# Needs: g++ 9 or newer. All variants together take about half an hour and up to 12 GB; those up to 400 000 states half a
# minute. One variant with its trace: build a model as below, and run `MODEL NAME`.
set -euo pipefail
cd "$(dirname "$0")"

limit=()
if [ "${1:-}" = --states-max ]; then
  limit=("$1" "$2")
  shift 2
fi
models=("$@")
[ "${#models[@]}" -gt 0 ] || models=(selftest door epochs offline clones parking turns presence wakeup window events jobs)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0
for model in "${models[@]}"; do
  echo "== $model"
  g++ -std=c++17 -O2 -Wall -Wextra -o "$work/$model" "$model.cpp"
  "$work/$model" ${limit[@]+"${limit[@]}"} || status=1
done
exit "$status"
