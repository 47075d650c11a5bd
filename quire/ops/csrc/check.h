// Checks of arguments: the message is put together only when it is needed.
#pragma once

#include <sstream>
#include <stdexcept>

namespace quire {

template <class... Parts>
void need(bool holds, const Parts&... parts) {
    if (holds) return;
    std::ostringstream message;
    (message << ... << parts);
    throw std::invalid_argument(message.str());
}

}  // namespace quire
