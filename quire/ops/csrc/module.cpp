// The Python module quire.ops._cpu: checks arguments here, kernels take raw pointers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <stdexcept>

#include "bind.h"
#include "check.h"
#include "cpu.h"
#include "numpy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

Isa best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni"))
        return Isa::avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return Isa::avx2;
#endif
    return Isa::portable;
}

const char* isa_name(Isa isa) {
    return isa == Isa::avx512 ? "avx512-vnni" : isa == Isa::avx2 ? "avx2" : "portable";
}

Isa isa_from_name(const std::string& name) {
    const Isa best = best_isa();
    if (name == "auto") return best;
    for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
        if (name != isa_name(isa)) continue;
        if (isa > best) throw std::invalid_argument("this CPU does not run " + name);
        return isa;
    }
    throw std::invalid_argument("unknown instruction set " + name + " (portable, avx2, avx512-vnni)");
}

static void bind_cpu(nb::module_& m) {
    nb::class_<Array>(m, "Array", "A float32 matrix on the CPU.")
        .def_ro("rows", &Array::rows)
        .def_ro("cols", &Array::cols)
        .def_prop_ro("shape", [](const Array& a) { return nb::make_tuple(a.rows, a.cols); })
        .def_prop_ro("nbytes", [](const Array& a) { return a.rows * a.cols * int64_t(sizeof(float)); })
        .def("numpy",
             [](Array& a) {
                 const size_t shape[2] = {size_t(a.rows), size_t(a.cols)};
                 return nb::ndarray<nb::numpy, float>(a.data, 2, shape, nb::find(a));
             },
             "The same bytes as a NumPy array; keeps this one alive.");

    nb::class_<Cpu>(m, "Cpu", "The CPU as a device: threads, instruction set, arrays.")
        .def("__init__",
             [](Cpu* self, int threads, const std::string& isa, bool exact) {
                 if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be 1 to 1024");
                 new (self) Cpu(threads, isa_from_name(isa), exact);
             },
             "threads"_a, "isa"_a = "auto", "exact"_a = false)
        .def_prop_ro("threads", [](Cpu& c) { return c.pool.size(); })
        .def_prop_ro("isa", [](Cpu& c) { return isa_name(c.isa); })
        .def_prop_ro("exact", [](Cpu& c) { return c.exact; })
        .def_prop_ro("arena_bytes", [](Cpu& c) { return c.arena->held(); })
        .def("trim", [](Cpu& c) { c.arena->trim(); })
        .def("empty", &Cpu::array, "rows"_a, "cols"_a)
        .def("array",
             [](Cpu& c, FloatRows values) {
                 Array a = c.array(int64_t(values.shape(0)), int64_t(values.shape(1)));
                 std::memcpy(a.data, values.data(), size_t(a.rows * a.cols) * 4);
                 return a;
             },
             "values"_a, "A copy of a NumPy matrix.")
        .def("take_rows",
             [](Cpu& c, const Array& x, Ints rows) {
                 const int64_t n = int64_t(rows.shape(0));
                 for (int64_t i = 0; i < n; i++)
                     need(rows.data()[i] >= 0 && rows.data()[i] < x.rows, "take_rows: there is no row ",
                          rows.data()[i], " in ", x.rows);
                 Array out = c.array(n, x.cols);
                 for (int64_t i = 0; i < n; i++)
                     std::memcpy(out.row(i), x.row(rows.data()[i]), size_t(x.cols) * 4);
                 return out;
             },
             "x"_a, "rows"_a);
}

static void bind_refusals() {
    // Held for good: translators live as long as the process.
    nb::object refused = nb::module_::import_("quire.ops").attr("Refused");
    nb::register_exception_translator(
        [](const std::exception_ptr& thrown, void* kind) {
            try {
                std::rethrow_exception(thrown);
            } catch (const Refused& refused) {
                PyErr_SetString(static_cast<PyObject*>(kind), refused.what());
            }
        },
        refused.release().ptr());
}

}  // namespace quire

NB_MODULE(_cpu, m) {
    quire::bind_refusals();
    quire::bind_cpu(m);
    quire::bind_matrix(m);
    quire::bind_experts(m);
    quire::bind_attention(m);
    quire::bind_page_work(m);
    quire::bind_sampling(m);
    quire::bind_recurrent(m);
}
