// A linear map in memory and what is done with it. Arguments are checked by the caller.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu.h"
#include "matmul.h"
#include "pack.h"

namespace quire {

const MatmulKernels& matmul_kernels(Isa isa);

// [rows, cols], made of parts stacked along the rows: qkv in one, gate and up in one.
struct Matrix {
    Isa isa;
    int64_t rows, cols;
    std::vector<Part> parts;
    TileMemory memory;
};

// One matrix of a file: rows × cols weights of a format, row after row.
struct FilePart {
    const FileFormat* format;
    int64_t rows, cols;
    const uint8_t* data;
};

int64_t packed_bytes(Isa isa, const FileFormat& format, int64_t rows, int64_t cols);
Matrix pack(Cpu& cpu, const std::vector<FilePart>& parts);
void unpack(const Matrix& w, float* out);  // row-major
void embed(Cpu& cpu, const Matrix& w, const int32_t* ids, int64_t n, float scale, float* out);

// What is done to x before the product and with its result.
struct Linear {
    const float* norm = nullptr;  // rms_norm(x) · norm
    float eps = 0;
    Act act = Act::none;          // x is [gate | up]
    const float* bias = nullptr;
    bool add = false;             // to what out holds
    bool exact = false;           // float32 activations, whatever the device's choice
    bool pairs = false;           // rows of x come in pairs: out has one row for two, their sum
};
void linear(Cpu& cpu, const Array& x, const Matrix& w, const Linear& options, Array& out);

void rms_norm(Cpu& cpu, const Array& x, const float* weight, float eps, Array& out);
void add_norm(Cpu& cpu, const Array& x, const float* weight, float eps, Array& into);  // into += rms_norm(x)
void softcap(Cpu& cpu, float cap, Array& x);                                           // x = cap · tanh(x / cap)
void act_mul(Cpu& cpu, const Array& x, Act act, Array& out);

}  // namespace quire
