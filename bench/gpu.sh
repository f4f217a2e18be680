#!/usr/bin/env bash
# Every check and benchmark of the GPU path, one after another: bash bench/gpu.sh RESULTS [PYTHON]
# Each leaves RESULTS/<name>.log, and RESULTS/<name>.jsonl if it has figures, as soon as it ends; a line for each on stdout. The
# checks run side by side first, because compiling is most of their time; benchmarks run alone. About 10 minutes with an empty cache.
set -uo pipefail
results=$(mkdir -p "$1" && cd "$1" && pwd)
python=${2:-python3}
cd "$(dirname "$0")/.."
export PYTHONPATH=.:bench${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
tests=("$python" -m pytest -q -o "addopts=--import-mode=importlib -p no:cacheprovider" --tb=short)
workers=()
if "$python" -c "import xdist" 2> /dev/null; then workers=(-n 4); fi

run() { # name, seconds, command
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    timeout "$limit" "$@" > "$results/$name.log" 2>&1
    echo "$name: exit code $?, $((SECONDS - begin)) s, $(tail -n 1 "$results/$name.log" | cut -c1-120)"
}

figures() { # name, seconds, arguments of bench/name.py
    local name=$1 limit=$2
    shift 2
    run "$name" "$limit" "$python" "bench/$name.py" "$@" --json "$results/$name.jsonl"
}

run kernels 300 "${tests[@]}" "${workers[@]}" -k "not compiled_ahead and not ahead_of_time" tests/ops tests/models/test_device_model.py &
run gpu_tests 300 "${tests[@]}" "${workers[@]}" tests/gpu tests/runtime &
run memcheck 300 compute-sanitizer --tool memcheck --error-exitcode 9 "${tests[@]}" tests/models/test_device_model.py -k official &
run parity 300 "$python" bench/against_transformers.py --only parity --json "$results/parity.jsonl" &
wait
run speed 200 "$python" bench/against_transformers.py --only speed --json "$results/speed.jsonl"
figures serve_gpu 240
figures decode 300
figures one_million 200 --ratios 0,4,128,4
figures gemm 120
figures attend 120
figures heads 200 --rival
figures index 120
figures latent 120
figures hyper 90
figures experts 120
figures epilogue 90
figures sample 90
figures fusions 120
figures lamina_tiny 200
