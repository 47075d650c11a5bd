// One layer's attention as Python describes it: its heads, its rotary embedding, its place in a page.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "attention.h"
#include "check.h"
#include "cpu.h"
#include "numpy.h"

namespace quire {

inline const AttentionKernels& attention_kernels_of(Isa isa) {
#if defined(QUIRE_X86)
    if (isa == Isa::avx512) return avx512::attention_kernels;
    if (isa == Isa::avx_vnni || isa == Isa::avx2) return avx2::attention_kernels;
#elif defined(QUIRE_ARM)
    if (isa == Isa::i8mm || isa == Isa::neon) return neon::attention_kernels;
#endif
    (void)isa;
    return portable::attention_kernels;
}

struct Rope {
    int n_rot;
    std::vector<double> freqs;
    bool neox;
    double mscale;

    Rope(int n, Doubles f, bool x, double m)
        : n_rot(n), freqs(f.data(), f.data() + f.shape(0)), neox(x), mscale(m) {
        need(n > 0 && n % 2 == 0, "Rope: n_rot is ", n, ", it must be even and positive");
        need(freqs.size() * 2 == size_t(n), "Rope: ", freqs.size(), " frequencies for n_rot ", n,
             ", one per pair is needed");
    }

    // Cosines, then sines, of one position.
    void row(double position, double scale, float* out) const {
        const int half = n_rot / 2;
        for (int i = 0; i < half; i++) {
            const double angle = position * freqs[size_t(i)];
            out[i] = float(std::cos(angle) * scale);
            out[half + i] = float(std::sin(angle) * scale);
        }
    }
};

struct RopeTable : Array {
    bool neox;
    RopeTable(Array&& a, bool x) : Array(std::move(a)), neox(x) {}
};

inline KvType kv_type(const std::string& name) {
    const char* names[] = {"f32", "f16", "bf16", "q8_0", "q4_0"};
    for (int i = 0; i < 5; i++)
        if (name == names[i]) return KvType(i);
    throw Refused("unknown K/V type " + name + " (f32, f16, bf16, q8_0, q4_0)");
}

struct AttentionSpec {
    AttentionShape shape;
    std::vector<float> q_norm, k_norm;

    AttentionSpec(int n_heads, int n_kv_heads, int dk, int dv, const std::string& type_k, const std::string& type_v,
                  float scale, int window, float softcap, const Array* q, const Array* k, float eps) {
        need(n_kv_heads > 0 && n_heads > 0 && n_heads % n_kv_heads == 0, "AttentionSpec: ", n_heads,
             " heads do not divide into ", n_kv_heads, " kv heads");
        need(window >= 0 && softcap >= 0, "AttentionSpec: window and softcap must not be negative");
        check_dims("K", dk, type_k);
        check_dims("V", dv, type_v);
        q_norm = weights("q_norm", q, dk);
        k_norm = weights("k_norm", k, dk);
        shape = {n_heads, n_kv_heads, n_heads / n_kv_heads, dk, dv, (dv + 15) / 16 * 16, kv_type(type_k),
                 kv_type(type_v), scale, softcap, window, q ? q_norm.data() : nullptr, k ? k_norm.data() : nullptr,
                 eps};
    }
    AttentionSpec(const AttentionSpec&) = delete;

    int64_t k_bytes(int page_tokens) const { return bytes(shape.type_k, shape.dk) * page_tokens; }
    int64_t v_bytes(int page_tokens) const { return bytes(shape.type_v, shape.dv) * page_tokens; }

  private:
    int64_t bytes(KvType type, int dims) const {  // of one token
        constexpr int of_32[] = {4 * 32, 2 * 32, 2 * 32, 34, 18};
        return int64_t(shape.n_kv_heads) * dims * of_32[int(type)] / 32;
    }
    static void check_dims(const char* what, int dims, const std::string& type) {
        const int step = kv_type(type) >= KvType::q8_0 ? 32 : 2;
        need(dims > 0 && dims <= MAX_HEAD_DIM && dims % step == 0, "AttentionSpec: head dimension ", dims, " of ", what,
             " as ", type, " must be a multiple of ", step, " up to ", MAX_HEAD_DIM);
    }
    static std::vector<float> weights(const char* what, const Array* a, int dk) {
        if (!a) return {};
        need(a->rows * a->cols == dk, "AttentionSpec: ", what, " has ", a->rows * a->cols,
             " values, the head dimension is ", dk);
        return std::vector<float>(a->data, a->data + dk);
    }
};

inline void check_parts(const AttentionSpec& spec, int64_t page_bytes, int page_tokens, int64_t k_offset, int64_t v_offset) {
    need(k_offset >= 0 && v_offset >= 0 && k_offset + spec.k_bytes(page_tokens) <= page_bytes &&
             v_offset + spec.v_bytes(page_tokens) <= page_bytes,
         "attention: K at ", k_offset, " or V at ", v_offset, " lies outside a page of ", page_bytes, " bytes");
}

}  // namespace quire
