#!/usr/bin/env bash
# Sends a training job to a running cluster and shows its output. Ctrl-C stops the showing, not the job.
#
#   [ADDRESS=http://head:8265] cluster/submit.sh CONFIG [key=value ...]
#
# Without ADDRESS it goes to the cluster of `make up`, and runs in this folder. With ADDRESS this folder's files are
# sent along (what git ignores is not); data and trainer.run_dir must then lie where every machine sees them.
set -euo pipefail
cd "$(dirname "$0")/.."
config=${1:?usage: cluster/submit.sh CONFIG [key=value ...]}
shift
export RAY_AUTH_MODE=token

fail() { printf 'submit: %s\n' "$*" >&2; exit 1; }

# Refuse what would be refused there, before anything is sent.
run_dir=$(.venv/bin/python - "$config" "$@" <<'PY'
import sys
from paravt_ray.config import load_config
from paravt_ray.errors import UserError
try:
    print(load_config(sys.argv[1], sys.argv[2:]).trainer.run_dir)
except UserError as error:
    sys.exit(f"submit: {error}")
PY
)
quoted=$(printf '%q ' "$config" "$@" cluster.address=auto)
id=paravt_$(date +%Y%m%d_%H%M%S)_$$

# Ends with the job's exit code. Ray's own client also ends with 0 when the cluster goes away under the job.
send() {
  .venv/bin/ray job submit --address "$1" --submission-id "$id" "${@:2}" || exit
  local status # into a variable first: a grep that has found it would close the pipe under a client that still writes
  status=$(.venv/bin/ray job status --address "$1" "$id" 2>&1) && grep -qi succeeded <<<"$status" ||
    fail "The job $id did not end well, or its cluster is gone: what it finished is in $run_dir."
}

if [ -z "${ADDRESS:-}" ]; then
  address=$(cat outputs/cluster/address 2>/dev/null) || fail "No cluster is up here. Start one with 'make up', or name one: ADDRESS=http://head:8265."
  send "$address" -- bash -c "cd $(printf '%q' "$PWD") && exec paravt train $quoted"
  exit
fi
case $run_dir in
  /*) send "$ADDRESS" --working-dir . -- bash -c "exec python -m paravt_ray.cli train $quoted" ;;
  *) fail "trainer.run_dir is $run_dir, which would end with the job. Give a folder that all machines share: ARGS='trainer.run_dir=/shared/run'." ;;
esac
