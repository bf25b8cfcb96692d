#!/usr/bin/env bash
# Starts a Ray head on this machine, with the dashboard on the loopback address and a token that guards both.
#
#   cluster/up.sh [CPUS]     default: as many as the machine has, and at least 16
#
# They are logical: the actors of a run share the real cores, and mostly wait for each other.
#
# Everything that belongs to it is written to outputs/cluster, where `make down` and `make submit` find it. Other
# machines join with:  RAY_AUTH_MODE=token ray start --address=HEAD:PORT  and the same token in ~/.ray/auth_token.
set -euo pipefail
cd "$(dirname "$0")/.."
state=outputs/cluster
ray=.venv/bin/ray
mkdir -p "$state"
cpus=${1:-$(nproc)}
[ -n "${1:-}" ] || [ "$cpus" -ge 16 ] || cpus=16

fail() { printf 'up: %s\n' "$*" >&2; exit 1; }

if [ -f "$state/pid" ] && kill -0 "$(cat "$state/pid")" 2>/dev/null; then
  fail "A cluster is up already (process $(cat "$state/pid")). Use it with 'make submit', or end it with 'make down'."
fi

export RAY_AUTH_MODE=token PATH="$PWD/.venv/bin:$PATH"
(umask 077 && "$ray" get-auth-token --generate >/dev/null) # made once, kept in ~/.ray/auth_token for this user alone
chmod 600 ~/.ray/auth_token # also one that Ray has made by itself, which everybody can read

free_port() { # the first free port from $1 on
  .venv/bin/python - "$1" <<'PY'
import socket, sys
for port in range(int(sys.argv[1]), int(sys.argv[1]) + 100):
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            continue
        print(port)
        break
PY
}
head=$(free_port 6379) dashboard=$(free_port 8265) agent=$(free_port 52365) client=$(free_port 10001)

echo "up: Starting the head (about 10 s)."
# In a session of its own, so that everything under it can be ended together and nothing else.
setsid "$ray" start --head --block --disable-usage-stats --num-cpus "$cpus" --port "$head" \
  --dashboard-host 127.0.0.1 --dashboard-port "$dashboard" --dashboard-agent-listen-port "$agent" \
  --ray-client-server-port "$client" >"$state/ray.log" 2>&1 </dev/null &
pid=$!
echo "$pid" >"$state/pid"

for _ in $(seq 60); do
  kill -0 "$pid" 2>/dev/null || { tail -n 5 "$state/ray.log" >&2; rm -f "$state/pid"; fail "Ray did not start, for the reason above."; }
  if "$ray" job list --address "http://127.0.0.1:$dashboard" >/dev/null 2>&1; then
    echo "http://127.0.0.1:$dashboard" >"$state/address"
    echo "up: Ready. Submit a job:  make submit CONFIG=configs/debug.yaml    End it:  make down"
    echo "up: Dashboard http://127.0.0.1:$dashboard (it asks for the token: RAY_AUTH_MODE=token $ray get-auth-token)"
    exit 0
  fi
  sleep 1
done
cluster/down.sh
fail "The head did not answer within a minute; its output is in $state/ray.log."
