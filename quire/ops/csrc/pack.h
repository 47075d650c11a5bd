// From a file's rows to tiles.
#pragma once

#include <cstdint>

#include "tiles.h"

namespace quire {

// A matrix format of GGUF files.
struct FileFormat {
    int id;            // ggml's number for it
    const char* name;
    int block, bytes;  // weights in one block, and their bytes
    Tile tile;         // what it is packed into
    // Writes row blocks [begin, end); padding rows are left as they are.
    void (*pack)(const uint8_t* file, int64_t rows, int64_t cols, int lanes, uint8_t* out, int64_t begin,
                 int64_t end);
};

// Null for an id that cannot be packed.
const FileFormat* file_format(int id);

}  // namespace quire
