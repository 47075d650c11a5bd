// experts and add_gated as methods of Cpu: all arguments are checked here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "bind.h"
#include "check.h"
#include "experts.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// A matrix of some parts for each expert, which have `rows` rows together.
void check_stack(const Cpu& cpu, const Matrix& w, const char* name, int64_t experts, int64_t rows, int64_t cols) {
    need(w.isa == cpu.isa, name, " was packed for ", isa_name(w.isa), ", not ", isa_name(cpu.isa));
    need(w.cols == cols, name, " has ", w.cols, " columns where ", cols, " are needed");
    const int64_t parts = int64_t(w.parts.size());
    need(parts % experts == 0, name, " has ", parts, " parts, which are not some for each of ", experts, " experts");
    for (int64_t e = 0; e < experts; e++) {
        int64_t sum = 0;
        for (int64_t p = e; p < parts; p += experts) sum += w.parts[size_t(p)].rows;
        need(sum == rows, name, " has ", sum, " rows for expert ", e, " where ", rows, " are needed");
    }
}

void check_entrance(const Cpu& cpu, const Array& x, const Matrix& router, const Matrix& gate_up, int64_t ffn,
                    int64_t n_used, const Array& norm) {
    const int64_t count = router.rows, width = x.cols;
    need(router.isa == cpu.isa, "router was packed for ", isa_name(router.isa), ", not ", isa_name(cpu.isa));
    need(router.cols == width, "router has ", router.cols, " columns where ", width, " are needed");
    need(n_used >= 1 && n_used <= count, "n_used is ", n_used, "; there are ", count, " experts");
    need(norm.rows * norm.cols == width, "norm has ", norm.rows * norm.cols, " values where ", width, " are needed");
    check_stack(cpu, gate_up, "gate_up", count, 2 * ffn, width);
}

nb::object run_experts(Cpu& cpu, const Array& x, const Matrix& router, const Matrix& gate_up, const Matrix& down,
                        int64_t n_used, const Array& norm, float eps, bool normalize, float scale, nb::handle into) {
    check_entrance(cpu, x, router, gate_up, down.cols, n_used, norm);
    check_stack(cpu, down, "down", router.rows, x.cols, down.cols);
    Array& out = nb::cast<Array&>(into);
    need(out.rows == x.rows && out.cols == x.cols, "into has other rows and columns than x");
    nb::object result = nb::borrow(into);
    nb::gil_scoped_release released;
    experts(cpu, x, {router, gate_up, norm.data, eps}, down, {n_used, normalize, scale}, out);
    return result;
}

std::pair<Array, Array> run_experts_in(Cpu& cpu, const Array& x, const Matrix& router, const Matrix& gate_up,
                                       int64_t n_used, const Array& norm, float eps, bool normalize, float scale) {
    need(router.rows > 0 && gate_up.rows % (2 * router.rows) == 0, "gate_up has ", gate_up.rows, " rows");
    const int64_t ffn = gate_up.rows / (2 * router.rows);
    check_entrance(cpu, x, router, gate_up, ffn, n_used, norm);
    Array chosen = cpu.array(x.rows, 2 * n_used), middle = cpu.array(x.rows * n_used, ffn);
    nb::gil_scoped_release released;
    experts_in(cpu, x, {router, gate_up, norm.data, eps}, {n_used, normalize, scale}, chosen, middle);
    return {std::move(chosen), std::move(middle)};
}

nb::object run_experts_out(Cpu& cpu, const Array& middle, const Array& chosen, int64_t count, const Matrix& down,
                           nb::handle into) {
    Array& out = nb::cast<Array&>(into);
    need(chosen.cols > 0 && chosen.cols % 2 == 0 && chosen.rows == out.rows, "chosen has ", chosen.rows, " rows of ",
         chosen.cols, " numbers");
    const int64_t used = chosen.cols / 2;
    need(middle.rows == out.rows * used && middle.cols == down.cols, "middle has ", middle.rows, " rows of ",
         middle.cols, " columns");
    need(count >= 1, "there are ", count, " experts");
    check_stack(cpu, down, "down", count, out.cols, down.cols);
    for (int64_t t = 0; t < chosen.rows; t++)
        for (int64_t k = 0; k < used; k++) {
            const float id = chosen.row(t)[k];
            need(id >= 0 && id < float(count), "there is no expert ", id);
        }
    nb::object result = nb::borrow(into);
    nb::gil_scoped_release released;
    experts_out(cpu, middle, chosen, count, down, out);
    return result;
}

void run_add_gated(Cpu& cpu, Array& into, const Array& y, const Array& gate) {
    need(into.rows == y.rows && into.cols == y.cols, "into has other rows and columns than y");
    need(gate.rows == y.rows && gate.cols == 1, "gate must be one column of ", y.rows, " rows");
    nb::gil_scoped_release released;
    add_gated(cpu, y, gate, into);
}

}  // namespace

void bind_experts(nb::module_& m) {
    nb::borrow<nb::class_<Cpu>>(m.attr("Cpu"))
        .def("experts", run_experts, "x"_a, "router"_a, "gate_up"_a, "down"_a, "n_used"_a, "norm"_a, "eps"_a,
             "normalize"_a, "scale"_a, "into"_a,
             "Adds to `into` what the n_used likeliest experts of each row make of it.")
        .def("experts_in", run_experts_in, "x"_a, "router"_a, "gate_up"_a, "n_used"_a, "norm"_a, "eps"_a,
             "normalize"_a, "scale"_a, "The first half: who is chosen for each row, and what gate and up make of it.")
        .def("experts_out", run_experts_out, "middle"_a, "chosen"_a, "count"_a, "down"_a, "into"_a,
             "The second half: adds to `into` what down makes of that.")
        .def("add_gated", run_add_gated, "into"_a, "y"_a, "gate"_a, "into += sigmoid(gate) · y, by rows.");
}

}  // namespace quire
