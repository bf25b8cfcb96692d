#!/usr/bin/env bash
# Opens the curves of all runs in MLflow's web page, for this machine only. Ctrl-C ends it; nothing is lost.
#
#   cluster/mlflow.sh [DATABASE]     default: outputs/mlflow.db, which runs write to where tracking.uri is empty
set -euo pipefail
cd "$(dirname "$0")/.."
database=${1:-outputs/mlflow.db}
if [ ! -f "$database" ]; then
  echo "mlflow: There is no $database yet. Start a run first, for example with 'make debug'." >&2
  exit 1
fi
port=$(.venv/bin/python - <<'PY'
import socket
for port in [*range(5000, 5020), 0]:  # 0: any free one
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        print(probe.getsockname()[1])
        break
PY
)
echo "mlflow: Open http://127.0.0.1:$port in a browser (in about 10 s). Ctrl-C ends the server."
export MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false # no calls outside, no idle job workers
exec .venv/bin/mlflow server --backend-store-uri "sqlite:///$(realpath "$database")" --host 127.0.0.1 --port "$port" \
  --workers 1 --no-serve-artifacts --default-artifact-root "$(dirname "$(realpath "$database")")/mlflow_artifacts"
