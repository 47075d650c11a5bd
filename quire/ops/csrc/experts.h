// A mixture of experts: a router chooses a few of many gated networks for each token.
#pragma once

#include "matrix.h"

namespace quire {

// What a layer's experts begin with; they end with another matrix. Both have a part, or several, for
// each expert: the first `count` parts are one tensor's, expert by expert, the next `count` another's.
// An expert's rows are those of its parts, one after the other: gate, then up.
struct Entrance {
    const Matrix &router, &gate_up;
    const float* norm;  // of x, before all else
    float eps;
    int64_t count() const { return router.rows; }
};

// How a token's experts are chosen and weighed.
struct Routing {
    int64_t used;    // experts of a token: the likeliest, of equals the one with the lower number
    bool normalize;  // whether the weights of the chosen add up to `scale`
    float scale;
};

// out += Σ weight · down(silu(gate(h)) · up(h)) over the chosen experts, most likely first. No bit
// of a token's result depends on what else is in the batch. Arguments are checked by the caller.
void experts(Cpu& cpu, const Array& x, const Entrance& w, const Matrix& down, const Routing& routing, Array& out);

// The same in two halves, with the same bits. Row token · used + k of `middle` is silu(gate) · up of a
// token's k-th expert; `chosen` has for each token the numbers of its experts, then their weights.
void experts_in(Cpu& cpu, const Array& x, const Entrance& w, const Routing& routing, Array& chosen, Array& middle);
void experts_out(Cpu& cpu, const Array& middle, const Array& chosen, int64_t count, const Matrix& down, Array& out);

// out += sigmoid(gate) · y, with one gate for each row.
void add_gated(Cpu& cpu, const Array& y, const Array& gate, Array& out);

}  // namespace quire
