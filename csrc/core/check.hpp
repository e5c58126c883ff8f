/// Exceptions of the core and the macro that guards its invariants.
///
/// A caller's mistake is `std::invalid_argument` (ValueError in Python), an id that nobody knows is
/// `UnknownSequenceError` (KeyError), a broken invariant is `InternalError` (RuntimeError).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace deepinfer {

/// An invariant of the core does not hold; the engine must stop.
class InternalError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// No sequence has this id, or it has been released.
class UnknownSequenceError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// Streams all parts into one string.
template <typename... Parts>
std::string concat(const Parts&... parts) {
    std::ostringstream stream;
    (stream << ... << parts);
    return stream.str();
}

}  // namespace deepinfer

/// Throws `InternalError` with the condition and the given parts when `condition` is false.
#define DI_CHECK(condition, ...)                                                    \
    do {                                                                            \
        if (!(condition)) [[unlikely]] {                                            \
            throw ::deepinfer::InternalError(                                       \
                ::deepinfer::concat("check failed: " #condition " ", __VA_ARGS__)); \
        }                                                                           \
    } while (false)
