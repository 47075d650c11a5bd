// A recurrent layer as Python describes it, and one step's states and logs.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "check.h"
#include "numpy.h"
#include "recurrent.h"

namespace quire {

class RecurrentLayer {
  public:
    RecurrentLayer(RecurrentLayer&&) = default;  // a copy's shape would point into the original

    static RecurrentLayer delta_net(int n_k, int n_v, int dk, int dv, FloatRows conv, std::optional<Floats> bias,
                                    Floats a, Floats dt_bias, bool tiled) {
        RecurrentLayer layer("delta_net", n_k, n_v, dk, dv);
        RecurrentShape& s = layer.shape;
        const int64_t keys = int64_t(n_k) * dk, values = int64_t(n_v) * dv;
        s.kind = RecurrentKind::delta;
        s.tiled = tiled;
        s.k_at = keys;
        s.v_at = 2 * keys;
        s.beta_at = s.channels = 2 * keys + values;
        s.alpha_at = s.beta_at + n_v;
        s.entry = s.in_cols = s.alpha_at + n_v;
        layer.set_gates(a, dt_bias);
        layer.set_conv(conv, bias);
        return layer;
    }

    static RecurrentLayer ssd(int n_heads, int n_groups, int head_dim, int state_dim, FloatRows conv,
                              std::optional<Floats> bias, Floats a, Floats dt_bias, Floats d, float low, float high) {
        RecurrentLayer layer("ssd", n_groups, n_heads, state_dim, head_dim);
        RecurrentShape& s = layer.shape;
        const int64_t keys = int64_t(n_groups) * state_dim, values = int64_t(n_heads) * head_dim;
        need(low <= high, "ssd: the limits of dt are ", low, " and ", high);
        s.kind = RecurrentKind::ssd;
        s.low = low;
        s.high = high;
        s.k_at = values;
        s.q_at = values + keys;
        s.beta_at = s.alpha_at = s.channels = values + 2 * keys;
        s.entry = s.in_cols = s.channels + n_heads;
        layer.set_gates(a, dt_bias);
        layer.d_ = layer.values("d", d, n_heads);
        layer.set_conv(conv, bias);
        return layer;
    }

    static RecurrentLayer short_conv(FloatRows conv, std::optional<Floats> bias) {
        const int64_t channels = int64_t(conv.shape(0));
        need(conv.shape(1) >= 2, "short_conv: a convolution of width ", conv.shape(1), " remembers nothing");
        RecurrentLayer layer("short_conv", 1, 1, 1, 1);
        RecurrentShape& s = layer.shape;
        s.kind = RecurrentKind::conv;
        s.channels = s.entry = s.out_cols = channels;
        s.in_cols = 3 * channels;
        layer.set_conv(conv, bias);
        return layer;
    }

    int64_t state_bytes() const { return shape.tail_bytes() + (scans() ? shape.n_v * shape.head_floats() * 4 : 0); }
    int64_t log_bytes() const { return shape.entry * 4; }
    bool scans() const { return shape.kind != RecurrentKind::conv; }

    RecurrentShape shape{};
    std::vector<float> zeros;  // a raw input from before the first token

  private:
    RecurrentLayer(const char* name, int n_k, int n_v, int dk, int dv) : name_(name) {
        need(n_k > 0 && n_v > 0 && n_v % n_k == 0, name, ": ", n_v, " heads do not divide into ", n_k, " groups");
        need(dk > 0 && dv > 0 && dk <= 4096 && dv <= 4096, name, ": head dimensions ", dk, " and ", dv,
             " must be 1 to 4096");
        shape.n_k = n_k;
        shape.n_v = n_v;
        shape.dk = dk;
        shape.dv = dv;
        shape.out_cols = int64_t(n_v) * dv;
    }

    std::vector<float> values(const char* what, const Floats& f, int64_t n) const {
        need(int64_t(f.shape(0)) == n, name_, ": ", what, " has ", f.shape(0), " values, ", n, " are needed");
        return std::vector<float>(f.data(), f.data() + n);
    }

    void set_gates(const Floats& a, const Floats& dt_bias) {
        a_ = values("ssm_a", a, shape.n_v);
        dt_bias_ = values("dt_bias", dt_bias, shape.n_v);
        for (float each : a_) need(each <= 0, name_, ": ssm_a is -exp(A_log) and so never positive; got ", each);
    }

    void set_conv(const FloatRows& conv, const std::optional<Floats>& bias) {
        RecurrentShape& s = shape;
        const int64_t width = int64_t(conv.shape(1));
        need(int64_t(conv.shape(0)) == s.channels && width >= 1 && width <= 16, name_, ": conv is [", conv.shape(0),
             ", ", width, "], [", s.channels, ", 1 to 16] is needed");
        s.width = int(width);
        weight_.resize(size_t(width * s.channels));
        for (int64_t c = 0; c < s.channels; c++)
            for (int64_t j = 0; j < width; j++) weight_[size_t(j * s.channels + c)] = conv.data()[c * width + j];
        if (bias) bias_ = values("conv_bias", *bias, s.channels);
        zeros.resize(size_t(s.channels));
        s.prepared_cols = scans() ? (s.channels + 2 * s.n_v + s.n_k + 15) / 16 * 16 : 0;
        s.weight = weight_.data();
        s.bias = bias ? bias_.data() : nullptr;
        s.a = a_.data();
        s.dt_bias = dt_bias_.data();
        s.d = d_.empty() ? nullptr : d_.data();
    }

    const char* name_;
    std::vector<float> weight_, bias_, a_, dt_bias_, d_;
};

// One group's states and logs in one step.
class States {
  public:
    struct Sequence {
        int64_t row = 0, count = 0;  // its new tokens in the batch
        int32_t state_in, state_out, log_in, log_length, log_out;
        int32_t tail;  // of a scan: last tokens that go to the log, behind the state that is written
    };

    States(int64_t state_base, int64_t state_page_bytes, int64_t log_base, int64_t log_page_bytes,
           int64_t log_stride, int64_t log_tokens, Ints state_in, Ints state_out, Ints log_in, Ints log_length,
           Ints log_out, Ints tail, Ints seq_rows)
        : state_page_bytes(state_page_bytes), log_page_bytes(log_page_bytes), log_stride(log_stride),
          log_tokens(log_tokens), n_tokens(int64_t(seq_rows.shape(0))),
          states_(reinterpret_cast<char*>(state_base)), logs_(reinterpret_cast<char*>(log_base)) {
        const size_t n = state_in.shape(0);
        need(state_out.shape(0) == n && log_in.shape(0) == n && log_length.shape(0) == n && log_out.shape(0) == n &&
                 tail.shape(0) == n,
             "States: state_in, state_out, log_in, log_length, log_out and tail need one entry per sequence");
        need(state_page_bytes > 0 && log_page_bytes > 0 && log_stride > 0 && log_tokens > 0 && log_stride % 4 == 0,
             "States: pages of ", state_page_bytes, " and ", log_page_bytes, " bytes, ", log_tokens, " entries of ",
             log_stride);
        for (size_t i = 0; i < n; i++)
            sequences.push_back({0, 0, state_in.data()[i], state_out.data()[i], log_in.data()[i],
                                 log_length.data()[i], log_out.data()[i], tail.data()[i]});
        for (int64_t i = 0; i < n_tokens; i++) {
            const int64_t s = seq_rows.data()[i];
            need(s >= 0 && s < int64_t(n), "States: token ", i, " is of sequence ", s, " of ", n);
            Sequence& q = sequences[size_t(s)];
            need(q.count == 0 || q.row + q.count == i, "States: the tokens of sequence ", s, " lie apart");
            if (q.count++ == 0) q.row = i;
        }
        for (size_t i = 0; i < n; i++) check(int64_t(i));
    }

    char* state(int32_t page) const { return page < 0 ? nullptr : states_ + page * state_page_bytes; }
    char* log(int32_t page) const { return page < 0 ? nullptr : logs_ + page * log_page_bytes; }

    std::vector<Sequence> sequences;
    int64_t state_page_bytes, log_page_bytes, log_stride, log_tokens, n_tokens;

  private:
    void check(int64_t i) const {
        const Sequence& q = sequences[size_t(i)];
        need(q.count > 0, "States: sequence ", i, " has no tokens");
        need(q.state_in >= -1 && q.state_out >= -1 && q.log_in >= -1 && q.log_out >= -1, "States: sequence ", i,
             " has a page below -1");
        need(q.log_length >= 0 && q.log_length <= log_tokens && (q.log_length == 0 || q.log_in >= 0),
             "States: sequence ", i, " has ", q.log_length, " entries in log page ", q.log_in, ", which holds ",
             log_tokens);
        if (q.state_out >= 0) check_scan(i);
        else check_append(i);
    }

    void check_append(int64_t i) const {
        const Sequence& q = sequences[size_t(i)];
        need(q.log_out >= 0 && q.tail == 0, "States: sequence ", i, " must write a state or a log, got state ",
             q.state_out, ", log ", q.log_out, " and a tail of ", q.tail);
        need(q.log_in < 0 || q.log_in == q.log_out, "States: sequence ", i, " reads log page ", q.log_in,
             " and writes ", q.log_out);
        need(q.log_length + q.count <= log_tokens, "States: sequence ", i, " appends ", q.count, " entries behind ",
             q.log_length, ", a log holds ", log_tokens);
    }

    void check_scan(int64_t i) const {
        const Sequence& q = sequences[size_t(i)];
        need(q.state_out != q.state_in, "States: sequence ", i, " would overwrite state page ", q.state_in);
        need(q.tail >= 0 && q.tail < q.count && q.tail <= log_tokens && (q.tail > 0) == (q.log_out >= 0),
             "States: sequence ", i, " puts the last ", q.tail, " of ", q.count, " tokens into log page ", q.log_out,
             ", which holds ", log_tokens);
        need(q.log_out < 0 || q.log_out != q.log_in, "States: sequence ", i, " would overwrite log page ", q.log_in);
    }

    char *states_, *logs_;
};

}  // namespace quire
