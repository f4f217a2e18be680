#!/usr/bin/env bash
# All that is measured of the embedded model on a GPU, in one call: bash bench/lamina_tiny_gpu.sh RESULTS DATA [MODEL] [PYTHON]
# DATA needs val.u16, documents.json and tokenizer.json of corpus.py. Everything runs side by side on the one GPU, because compiling
# and planning are most of the time; each part leaves RESULTS/<name>.log and, line by line, RESULTS/<name>.jsonl, and one that fails
# stops no other. A second call with the same RESULTS asks only what has no line yet. LIMIT (seconds, default 400) ends all parts;
# MILLIONS=fp8:fp4,bf16:bf16,fp32:fp32 asks about a million tokens in these formats (default fp8:fp4), TEXTS=7 about so many texts.
set -uo pipefail
results=$(mkdir -p "$1" && cd "$1" && pwd)
data=$(cd "$2" && pwd)
model=${3:-lamina-tiny}
[ -d "$model" ] && model=$(cd "$model" && pwd)
python=${4:-python3}
limit=${LIMIT:-400}
cd "$(dirname "$0")/.."
export PYTHONPATH=.:bench${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
device=${DEVICE:-cuda}

run() { # name, command
    local name=$1 begin=$SECONDS
    shift
    timeout --kill-after=10 "$((limit + 20))" "$@" > "$results/$name.log" 2>&1
    echo "$name: exit code $?, $((SECONDS - begin)) s, $(tail -n 1 "$results/$name.log" | cut -c1-160)"
}

evaluate() { # name, arguments
    local name=$1
    shift
    run "$name" "$python" -m tools.train_tiny.evaluate --data "$data" --model "$model" --device "$device" --seconds "$limit" \
        --out "$results/$name.jsonl" "$@"
}

run checks "$python" bench/lamina_tiny.py --model "$model" --device "$device" --json "$results/checks.jsonl" &
for formats in ${MILLIONS:-fp8:fp4}; do
    for one in ${formats//,/ }; do
        evaluate "million_${one%%:*}" --lengths "${MILLION:-1048576}" --facts 16,200 --formats "$one" --least 100 --most-texts "${TEXTS:-1}" &
    done
done
for formats in fp8:fp4 bf16:bf16 fp32:fp32; do
    evaluate "recall_${formats%%:*}" --lengths "${LENGTHS:-2048,8192,32768,131072}" --facts 16,200 --formats "$formats" &
done
evaluate wordings --lengths "${SHORT:-2048}" --splits train,held-out \
    --kinds recall,hard,words,templates,wording,statement,question,frame,completion,name,value,question+frame &
evaluate text --perplexity &
run needles "$python" -m tools.train_tiny.needles --model "$model" --device "$device" --show 60 --out "$results/needles.jsonl" &
wait
cat "$results"/*.jsonl > "$results/all.txt"
