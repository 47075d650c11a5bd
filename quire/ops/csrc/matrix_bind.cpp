// pack, embed, linear and their relatives as methods of Cpu: all arguments are checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bind.h"
#include "check.h"
#include "linear_int16.h"
#include "matrix.h"
#include "numpy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using PartTuple = std::tuple<int, int64_t, int64_t, Bytes>;

// For messages.
struct Shape {
    int64_t rows, cols;
};
std::string text(Shape s) { return '[' + std::to_string(s.rows) + ", " + std::to_string(s.cols) + ']'; }
Shape shape(const Array& a) { return {a.rows, a.cols}; }

const FileFormat& format_of(int type) {
    const FileFormat* format = file_format(type);
    need(format, "ggml type ", type, " is not supported");
    return *format;
}

// Bytes of the part in its file.
int64_t file_bytes(const FileFormat& format, int64_t rows, int64_t cols) {
    need(rows > 0 && cols > 0, "a matrix of shape ", Shape{rows, cols}, " is empty");
    need(cols % format.block == 0, cols, " columns are not a multiple of ", format.name, "'s block of ", format.block);
    int64_t bytes;
    const bool fits = !__builtin_mul_overflow(cols / format.block, int64_t(format.bytes), &bytes) &&
                      !__builtin_mul_overflow(bytes, rows, &bytes) && bytes < int64_t(1) << 46;
    need(fits, "a matrix of shape ", Shape{rows, cols}, " is too large");
    return bytes;
}

Matrix bind_pack(Cpu& cpu, const std::vector<PartTuple>& tuples) {
    need(!tuples.empty(), "a matrix needs at least one part");
    const int64_t first_cols = std::get<2>(tuples[0]);
    std::vector<FilePart> parts;
    for (const auto& [type, rows, cols, data] : tuples) {
        const FileFormat& format = format_of(type);
        const int64_t bytes = file_bytes(format, rows, cols);
        need(int64_t(data.nbytes()) == bytes, format.name, " of shape ", Shape{rows, cols}, " takes ", bytes,
             " bytes, not ", data.nbytes());
        need(cols == first_cols, "parts of ", first_cols, " and ", cols, " columns cannot be stacked");
        parts.push_back({&format, rows, cols, data.data()});
    }
    nb::gil_scoped_release released;
    return pack(cpu, parts);
}

int64_t bind_packed_bytes(Cpu& cpu, const std::vector<std::tuple<int, int64_t, int64_t>>& parts) {
    int64_t bytes = 0;
    for (const auto& [type, rows, cols] : parts) {
        const FileFormat& format = format_of(type);
        file_bytes(format, rows, cols);
        bytes += packed_bytes(cpu.isa, format, rows, cols);
    }
    return bytes;
}

void check_matrix(const Cpu& cpu, const Matrix& w) {
    need(w.isa == cpu.isa, "the matrix was packed for ", isa_name(w.isa), ", not ", isa_name(cpu.isa));
}

Array bind_embed(Cpu& cpu, const Matrix& w, Ints ids, float scale) {
    check_matrix(cpu, w);
    const int64_t n = int64_t(ids.shape(0));
    for (int64_t i = 0; i < n; i++)
        need(ids.data()[i] >= 0 && ids.data()[i] < w.rows, "id ", ids.data()[i], " is outside a matrix of ", w.rows,
             " rows");
    Array out = cpu.array(n, w.cols);
    nb::gil_scoped_release released;
    embed(cpu, w, ids.data(), n, scale, out.data);
    return out;
}

Act act_of(int act) {
    need(act >= 0 && act <= 2, "act must be 0 (none), 1 (silu) or 2 (gelu), not ", act);
    return Act(act);
}

// A vector of `length` floats, or null.
const float* vector(const Array* a, int64_t length, const char* name) {
    if (!a) return nullptr;
    need(a->rows * a->cols == length, name, " of shape ", shape(*a), " where ", length, " values are needed");
    return a->data;
}

Linear linear_options(const Cpu& cpu, const Array& x, const Matrix& w, const Array* norm, float eps, int act,
                      const Array* bias) {
    check_matrix(cpu, w);
    const Act kind = act_of(act);
    need(!norm || kind == Act::none, "norm and act cannot both be fused into one product");
    const int64_t cols = kind == Act::none ? w.cols : 2 * w.cols;
    need(x.cols == cols, "x of shape ", shape(x), " where ", cols, " columns are needed");
    return {vector(norm, w.cols, "norm"), eps, kind, vector(bias, w.rows, "bias"), false};
}

// The result: a new Array, or `into` after adding to it.
nb::object bind_linear(Cpu& cpu, const Array& x, const Matrix& w, const Array* norm, float eps, int act,
                       const Array* bias, nb::handle into) {
    Linear options = linear_options(cpu, x, w, norm, eps, act, bias);
    if (into.is_none()) {
        nb::object result = nb::cast(cpu.array(x.rows, w.rows), nb::rv_policy::move);
        Array& out = *nb::inst_ptr<Array>(result);
        nb::gil_scoped_release released;
        linear(cpu, x, w, options, out);
        return result;
    }
    Array& out = nb::cast<Array&>(into);
    need(out.rows == x.rows && out.cols == w.rows, "into of shape ", shape(out), " where ", Shape{x.rows, w.rows},
         " is needed");
    need(out.data != x.data, "into is x itself, which is read while the product is added: pass another array");
    options.add = true;
    nb::object result = nb::borrow(into);
    nb::gil_scoped_release released;
    linear(cpu, x, w, options, out);
    return result;
}

Array bind_linear_int16(Cpu& cpu, const Array& x, const Matrix& w, const Array& norm, float eps) {
    const Linear options = linear_options(cpu, x, w, &norm, eps, 0, nullptr);
    bool coarse = false;  // whether any part would see int8 activations
    for (const Part& part : w.parts) coarse |= !cpu.exact && !is_dense(part.tile);
    Array out = cpu.array(x.rows, w.rows);
    nb::gil_scoped_release released;
    if (coarse) linear_int16(cpu, x, w, options.norm, eps, out);
    else linear(cpu, x, w, options, out);
    return out;
}

Array bind_rms_norm(Cpu& cpu, const Array& x, const Array& weight, float eps) {
    const float* values = vector(&weight, x.cols, "weight");
    Array out = cpu.array(x.rows, x.cols);
    nb::gil_scoped_release released;
    rms_norm(cpu, x, values, eps, out);
    return out;
}

void bind_add_norm(Cpu& cpu, Array& into, const Array& x, const Array& weight, float eps) {
    const float* values = vector(&weight, x.cols, "weight");
    need(into.rows == x.rows && into.cols == x.cols, "into of shape ", shape(into), " where ", shape(x), " is needed");
    nb::gil_scoped_release released;
    add_norm(cpu, x, values, eps, into);
}

void bind_softcap(Cpu& cpu, Array& x, float cap) {
    need(cap > 0, "cap must be above 0, not ", cap);
    nb::gil_scoped_release released;
    softcap(cpu, cap, x);
}

Array bind_act_mul(Cpu& cpu, const Array& x, int act) {
    need(act == 1 || act == 2, "act must be 1 (silu) or 2 (gelu), not ", act);
    need(x.cols % 2 == 0, "x of shape ", shape(x), " where [gate | up] is needed");
    Array out = cpu.array(x.rows, x.cols / 2);
    nb::gil_scoped_release released;
    act_mul(cpu, x, Act(act), out);
    return out;
}

nb::ndarray<nb::numpy, float> bind_unpack(const Matrix& w) {
    float* data = new float[size_t(w.rows * w.cols)];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    {
        nb::gil_scoped_release released;
        unpack(w, data);
    }
    const size_t dims[2] = {size_t(w.rows), size_t(w.cols)};
    return nb::ndarray<nb::numpy, float>(data, 2, dims, owner);
}

}  // namespace

void bind_matrix(nb::module_& m) {
    nb::class_<Matrix>(m, "Matrix", "A linear map [rows, cols] packed into tiles for one instruction set.")
        .def_ro("rows", &Matrix::rows)
        .def_ro("cols", &Matrix::cols)
        .def_prop_ro("nbytes", [](const Matrix& w) { return w.memory.bytes(); })
        .def_prop_ro("formats", [](const Matrix& w) {
            std::vector<std::string> names;
            for (const Part& part : w.parts) names.push_back(layout_of(part.tile).name);
            return names;
        })
        .def("unpack", bind_unpack, "The values as float32, as the formats of the file define them.");

    nb::borrow<nb::class_<Cpu>>(m.attr("Cpu"))
        .def("pack", bind_pack, "parts"_a,
             "A Matrix from parts (ggml_type, rows, cols, bytes as in the file), stacked along the rows.")
        .def("packed_bytes", bind_packed_bytes, "parts"_a, "The nbytes of a Matrix of parts (ggml_type, rows, cols).")
        .def("embed", bind_embed, "table"_a, "ids"_a, "scale"_a = 1.0f, "The rows of w at ids, times scale.")
        .def("linear", bind_linear, "x"_a, "w"_a, "norm"_a.none() = nb::none(), "eps"_a = 0.0f, "act"_a = 0,
             "bias"_a.none() = nb::none(), "into"_a.none() = nb::none(),
             "x · wᵀ (+ bias), with x normalised or activated first; added to `into` where given.")
        .def("linear_int16", bind_linear_int16, "x"_a, "w"_a, "norm"_a, "eps"_a,
             "rms_norm(x) · wᵀ with 16 bits of each activation instead of 8.")
        .def("rms_norm", bind_rms_norm, "x"_a, "weight"_a, "eps"_a, "x · rsqrt(mean(x²) + eps) · weight, by rows.")
        .def("add_norm", bind_add_norm, "into"_a, "x"_a, "weight"_a, "eps"_a, "Adds rms_norm(x) · weight to into.")
        .def("softcap", bind_softcap, "x"_a, "cap"_a, "Turns x into cap · tanh(x / cap), in place.")
        .def("act_mul", bind_act_mul, "x"_a, "act"_a, "act(gate) · up of x = [gate | up].");
}

}  // namespace quire
