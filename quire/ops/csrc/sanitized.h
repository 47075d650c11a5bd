// Whether an address sanitizer watches: then every array and matrix lies by itself, at its very
// size, so that what is outside of one is noticed.
#pragma once

namespace quire {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool SANITIZED = true;
#else
constexpr bool SANITIZED = false;
#endif

}  // namespace quire
