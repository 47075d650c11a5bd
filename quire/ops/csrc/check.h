// Checks of arguments: the message is put together only when it is needed.
#pragma once

#include <sstream>
#include <stdexcept>

namespace quire {

// What the kernels cannot work with; Python sees quire.ops.Refused.
struct Refused : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

template <class... Parts>
void need(bool holds, const Parts&... parts) {
    if (holds) return;
    std::ostringstream message;
    (message << ... << parts);
    throw Refused(message.str());
}

}  // namespace quire
