#!/usr/bin/env bash
# A training run on Slurm: a Ray cluster for the length of the job, and the run inside it.
#
#   sbatch --nodes=2 --gpus-per-node=8 cluster/slurm.sh configs/paragrpo_8b.yaml trainer.run_dir=/shared/run
#
# Submit it from this folder, which all nodes must see, with .venv made for them (cluster/setup.sh gpu). A job that is
# requeued goes on from its newest checkpoint.
#SBATCH --job-name=paravt
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --output=%x-%j.log
#SBATCH --requeue
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?Submit this script with sbatch.}"
config=${1:?usage: sbatch cluster/slurm.sh CONFIG [key=value ...]}
shift

# A token of this job alone, so that other jobs on the network cannot reach its cluster.
RAY_AUTH_TOKEN=$(.venv/bin/python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token PATH="$PWD/.venv/bin:$PATH"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on=(srun --overlap --nodes=1 --ntasks=1)
head=$("${on[@]}" --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')
address=$head:$((20000 + SLURM_JOB_ID % 20000))
cpus=${SLURM_CPUS_PER_TASK:-32}

"${on[@]}" --nodelist="${nodes[0]}" ray start --block --head --node-ip-address="$head" --port="${address#*:}" --num-cpus="$cpus" \
  --include-dashboard=false --disable-usage-stats &
for node in "${nodes[@]:1}"; do
  "${on[@]}" --nodelist="$node" ray start --block --address="$address" --num-cpus="$cpus" --disable-usage-stats &
done
trap 'kill $(jobs -p) 2>/dev/null' EXIT

# Bounded: a node that does not come up must not hold all others until the time limit.
.venv/bin/python - "$address" "${#nodes[@]}" <<'PY'
import sys, time
import ray
address, wanted = sys.argv[1], int(sys.argv[2])
deadline = time.monotonic() + 300
while True:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        alive = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except (ConnectionError, RuntimeError):
        alive = 0
    if alive >= wanted:
        break
    if time.monotonic() > deadline:
        sys.exit(f"slurm: Only {alive} of {wanted} nodes joined the Ray cluster within 5 minutes.")
    time.sleep(2)
PY
paravt train "$config" cluster.address="$address" trainer.resume=auto "$@"
