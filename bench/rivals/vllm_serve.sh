#!/usr/bin/env bash
# vLLM's server on a CPU and `lamina bench serve` against it, beside Lamina's own: not part of any test, needs a network.
#
#   python bench/rivals/tiny_llama.py MODEL_DIR
#   bench/rivals/vllm_serve.sh MODEL_DIR [--concurrency 8 --num-prompts 64 ...]
#
# After the load come the two turns of a conversation, alone on the server (second_turn.py).
#
# vLLM is in an environment of its own (vllm_env.sh). MODEL_DIR is a checkpoint that vLLM runs on a CPU: Llama and Gemma 3 as
# Transformers writes them; its DeepSeek-V4 needs a GPU (or a CPU with AVX-512). Lamina's `lamina serve MODEL_DIR` then runs after it,
# where it knows the family.
set -euo pipefail

model=${1:?usage: bench/rivals/vllm_serve.sh MODEL_DIR [options of lamina bench serve]}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/vllm_env.sh"
lamina=${LAMINA:-"$python -m lamina"}
port=${PORT:-8011}

measure() { # NAME: waits for the server, then measures it
    for _ in $(seq 300); do
        curl --silent --fail "http://127.0.0.1:$port/health" > /dev/null && break
        kill -0 "$server" || { echo "error: $1 did not start" >&2; exit 1; }
        sleep 1
    done
    echo "== $1"
    $lamina bench serve "http://127.0.0.1:$port" --warmup 4 "${@:2}"
    PYTHONPATH="$here/../.." "$python" "$here/second_turn.py" "http://127.0.0.1:$port"
    kill "$server"
    wait "$server" || true
}

trap 'kill "$server" 2> /dev/null || true' EXIT
VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 "$environment/bin/python" -m vllm.entrypoints.openai.api_server \
    --model "$model" --dtype float32 --enforce-eager --host 127.0.0.1 --port "$port" &
server=$!
measure vllm "$@"
$lamina serve "$model" --host 127.0.0.1 --port "$port" --cache-format fp32 --index-format fp32 --quiet &
server=$!
measure lamina "$@"
