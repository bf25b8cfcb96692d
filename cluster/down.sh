#!/usr/bin/env bash
# Ends the Ray head that cluster/up.sh started on this machine, with all its processes, and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
state=outputs/cluster
pid=$(cat "$state/pid" 2>/dev/null) || { echo "down: No cluster of 'make up' is running."; exit 0; }

# A process number may have been given to another program since.
if ! { tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null | grep -q 'ray start --head'; then
  rm -f "$state/pid" "$state/address"
  echo "down: The cluster had ended already."
  exit 0
fi
kill -TERM "$pid"
for _ in $(seq 30); do # the session that up.sh made holds the head and everything that it started
  if [ -z "$(ps -o pid= -s "$pid")" ]; then break; fi
  sleep 1
done
left=$(ps -o pid= -s "$pid" | tr '\n' ' ' || true)
[ -z "$left" ] || kill -KILL $left 2>/dev/null || true
rm -f "$state/pid" "$state/address"
echo "down: Ended."
