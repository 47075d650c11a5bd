#!/bin/sh
# The tests of the operations on an emulated aarch64, from a machine with Debian and another processor:
# the extension is compiled across, and Python and NumPy for aarch64 run under qemu. Needs apt-get with
# g++-aarch64-linux-gnu and qemu-user-static installed, and a Python with cmake and nanobind ($PYTHON).
# What is fetched stays in build/aarch64; arguments go to pytest.
set -eu
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
work="$PWD/build/aarch64"
root="$work/root" site="$work/site"

if [ ! -x "$root/usr/bin/python3.11" ]; then
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$root"
    : > "$work/status"
    apt="apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::Lists=$work/lists
         -o Dir::Cache=$work/cache -o Dir::State::status=$work/status"
    $apt update
    (cd "$work/debs" && $apt download python3.11 python3.11-minimal libpython3.11 libpython3.11-minimal \
        libpython3.11-stdlib libpython3.11-dev libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libssl3 libffi8 \
        libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1 libncursesw6 libtinfo6 libreadline8)
    for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$root"; done
fi
[ -d "$site/numpy" ] || "$python" -m pip install --quiet --target "$site" --python-version 3.11 \
    --implementation cp --abi cp311 --abi abi3 --abi none --only-binary=:all: \
    --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64 \
    numpy click rich pytest hypothesis minijinja llguidance

"$python" -m cmake -S . -B "$work/cmake" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-I$root/usr/include" \
    -DPython_EXECUTABLE="$(command -v "$python")" -DPython_INCLUDE_DIR="$root/usr/include/python3.11" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)"
"$python" -m cmake --build "$work/cmake" --parallel
cp "$work"/cmake/_cpu*.so quire/ops/_cpu.cpython-311-aarch64-linux-gnu.so

# What a process holds is the emulator's there, and it starts no other ones.
qemu-aarch64-static -cpu max -L "$root" -E PYTHONPATH="$site:$PWD" -E PYTHONDONTWRITEBYTECODE=1 \
    "$root/usr/bin/python3.11" -m pytest -q -p no:cacheprovider -m "not slow" tests/ops \
    --ignore tests/ops/test_native_memory.py --ignore tests/ops/test_native_threads.py "$@"
