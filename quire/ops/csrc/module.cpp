// The Python module quire.ops._cpu: checks arguments here, kernels take raw pointers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <stdexcept>

#if defined(QUIRE_ARM) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "bind.h"
#include "check.h"
#include "cpu.h"
#include "numpy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

// Whether this machine has the instructions, and this build the kernels.
static bool runs(Isa isa) {
#if defined(QUIRE_X86)
    __builtin_cpu_init();
    if (isa == Isa::avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
    if (isa == Isa::avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(QUIRE_HAS_AVX_VNNI)
    if (isa == Isa::avx_vnni) return __builtin_cpu_supports("avxvnni") && runs(Isa::avx2);
#endif
#elif defined(QUIRE_ARM) && defined(__linux__)
    constexpr unsigned long I8MM = 1 << 13;  // HWCAP2_I8MM, which older headers lack
    const bool dots = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    if (isa == Isa::i8mm) return dots && (getauxval(AT_HWCAP2) & I8MM) != 0;
    if (isa == Isa::neon) return dots;
#elif defined(QUIRE_ARM)
    if (isa == Isa::neon) return true;  // whatever Apple makes has it
#endif
    return isa == Isa::portable;
}

// The best first.
#if defined(QUIRE_ARM)
constexpr Isa ISAS[] = {Isa::i8mm, Isa::neon, Isa::portable};
#define ISA_NAMES "portable, neon-dotprod, i8mm"
#else
constexpr Isa ISAS[] = {Isa::neon, Isa::avx512, Isa::avx_vnni, Isa::avx2, Isa::portable};
#define ISA_NAMES "portable, avx2, avx-vnni, avx512-vnni, neon-dotprod"
#endif

Isa best_isa() {
    for (Isa isa : ISAS)
        if (runs(isa)) return isa;
    return Isa::portable;
}

const char* isa_name(Isa isa) {
    switch (isa) {
#if defined(QUIRE_ARM)
        case Isa::i8mm: return "i8mm";
#endif
        case Isa::neon: return "neon-dotprod";
        case Isa::avx512: return "avx512-vnni";
        case Isa::avx_vnni: return "avx-vnni";
        case Isa::avx2: return "avx2";
        default: return "portable";
    }
}

Isa isa_from_name(const std::string& name) {
    if (name == "auto") return best_isa();
    for (Isa isa : ISAS) {
        if (name != isa_name(isa)) continue;
        if (!runs(isa)) throw std::invalid_argument("this CPU does not run " + name);
        return isa;
    }
    throw std::invalid_argument("unknown instruction set " + name + " (" ISA_NAMES ")");
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
#if defined(NDEBUG)
    // Threads that Python leaves where they stand when the process ends hold what they used: no leak.
    nb::set_leak_warnings(false);
#endif
    quire::bind_refusals();
    quire::bind_cpu(m);
    quire::bind_matrix(m);
    quire::bind_experts(m);
    quire::bind_attention(m);
    quire::bind_page_work(m);
    quire::bind_sampling(m);
    quire::bind_recurrent(m);
}
