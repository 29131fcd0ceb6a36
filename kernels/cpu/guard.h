// Turns the exceptions of an operation into the reason that the C interface returns.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace ncompass {

// What the caller got wrong; nothing has been done.
inline void require(bool holds, const char* reason) {
  if (!holds) throw std::invalid_argument(reason);
}

template <class Operation>
const char* guarded(const Operation& operation) noexcept {
  thread_local std::string reason;  // lives until this thread's next refused call
  try {
    operation();
    return nullptr;
  } catch (const std::exception& error) {
    reason = error.what();
  } catch (...) {
    reason = "unknown error";
  }
  return reason.c_str();
}

}  // namespace ncompass
