"""The gated delta rule with states that are updated in place, to compare with."""

from __future__ import annotations

import ctypes

import torch

from quire.ops.cuda import nvrtc
from quire.ops.cuda.driver import call

K_HEADS, HEADS, DIM = 16, 48, 128
"""Of Qwen3.5-27B."""
IN_PLACE = r"""
struct InPlaceArgs {
  const float *x, *mixed, *a, *dt_bias;
  float *out, *states;
  long long state_words, state_at;
  int cols, channels;
};

extern "C" __global__ void __launch_bounds__(128) in_place(const InPlaceArgs a) {
  constexpr int STEPS = COLUMNS / 16;
  const Place p = place<COLUMNS>();
  const int seq = blockIdx.y, mine = p.start + p.group;
  float* state = a.states + seq * a.state_words + a.state_at + (p.head * DV + mine) * DK;
  const u32 to = shared_address(shared_memory + threadIdx.x);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    for (int j = 0; j < PARTS; j++)
      copy16(to + (i * PARTS + j) * 128 * 16, state + i * 16 * DK + 4 * p.lane8 + 32 * j);
    commit_copies();
  }
  wait_for_previous();
  let_next_start();
  const float* token = a.mixed + (long long)seq * a.channels;
  const float* raw = a.x + (long long)seq * a.cols + a.channels + p.head;
  float4 k[PARTS], q[PARTS];
  load_part(k, token + K_AT + p.shared * DK, p.lane8);
  load_part(q, token + Q_AT + p.shared * DK, p.lane8);
  float v[STEPS];
  for (int i = 0; i < STEPS; i++) v[i] = load(token + V_AT + p.head * DV + mine + i * 16);
  const float decay = expf(a.a[p.head] * softplus(load(raw + GATE_AT) + a.dt_bias[p.head]));
  const float rate = rate_of(load(raw + RATE_AT)), own = over_row(dot(k, q));
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    wait_copies_but(STEPS - 1 - i);
    float4 s[PARTS];
    for (int j = 0; j < PARTS; j++) s[j] = shared_memory[(i * PARTS + j) * 128 + threadIdx.x];
    float u = rate * (v[i] - decay * over_row(dot(s, k)));
    float y = (decay * over_row(dot(s, q)) + own * u) * rsqrtf((float)DK);
    if (p.lane8 == 0) a.out[(long long)seq * VALUES + p.head * DV + mine + i * 16] = y;
    for (int j = 0; j < PARTS; j++)
      ((float4*)(state + i * 16 * DK))[p.lane8 + 8 * j] = added(scaled(s[j], decay), u, k[j]);
  }
}
"""
"""One token of the gated delta rule for a head: its state is read and written."""


class InPlace(ctypes.Structure):
    """InPlaceArgs."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "mixed", "a", "dt_bias", "out", "states")),
        ("state_words", ctypes.c_longlong), ("state_at", ctypes.c_longlong),
        ("cols", ctypes.c_int), ("channels", ctypes.c_int),
    )  # fmt: skip


def in_place_kernel(columns: int) -> nvrtc.Kernel:
    """Compiled with the functions that the package's kernels are made of."""
    source = nvrtc.source_of(["common", "recur"]) + IN_PLACE
    shape = {"DK": DIM, "DV": DIM, "HEADS": HEADS, "K_HEADS": K_HEADS, "TILED": 0, "DELTA": 1,
             "COLUMNS": columns}  # fmt: skip
    here = nvrtc.native(torch.device("cuda", 0))
    code, module = nvrtc.compile_source(source, here.architecture, shape), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), code)
    return nvrtc.Kernel(module, "in_place", 128, here.most_shared, here.clusters)
