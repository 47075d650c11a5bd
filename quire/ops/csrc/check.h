// Checks of arguments: the message is put together only when it is needed.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace quire {

// What the kernels cannot work with; Python sees quire.ops.Refused.
struct Refused : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// Without streams: where this had a C++ library of its own linked in (GCC 13 on Ubuntu 24.04), a
// number that was written to one ended the process.
inline const char* text(const char* part) { return part; }
inline const std::string& text(const std::string& part) { return part; }
template <class Whole, class = std::enable_if_t<std::is_integral_v<Whole>>>
std::string text(Whole part) {
    return std::to_string(part);
}
inline std::string text(float part) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", double(part));
    return digits;
}

template <class... Parts>
void need(bool holds, const Parts&... parts) {
    if (holds) return;
    std::string message;
    ((message += text(parts)), ...);
    throw Refused(message);
}

}  // namespace quire
