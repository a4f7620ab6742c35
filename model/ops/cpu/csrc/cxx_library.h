// The functions of the C++ library that kernels call, for libraries that are linked with C's library alone.
//
// Zig would compile the whole C++ library first, for a minute, and put a part of it into each of our libraries. Headers
// of the C++ library need none of it for what they define themselves, such as std::atomic. Nothing throws exceptions.

#pragma once

#ifdef WITHOUT_CXX_LIBRARY

#include <cstdlib>
#include <new>

void* operator new(size_t size) {
    void* const memory = malloc(size);
    if (!memory) abort();
    return memory;
}
void* operator new(size_t size, std::align_val_t alignment) {
    void* memory;
    if (posix_memalign(&memory, (size_t)alignment, size)) abort();
    return memory;
}
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { free(memory); }

#ifndef __APPLE__  // where compilers call the system's own function
// Destroys a variable of a thread when the thread ends. The library stays loaded until then.
extern "C" int __cxa_thread_atexit_impl(void (*destroy)(void*), void* object, void* library);
extern "C" void* __dso_handle;
extern "C" int __cxa_thread_atexit(void (*destroy)(void*), void* object, void*) {
    return __cxa_thread_atexit_impl(destroy, object, &__dso_handle);
}
#endif

// Called for mistakes, such as a vector with a negative size.
_LIBCPP_BEGIN_NAMESPACE_STD
void __libcpp_verbose_abort(const char*, ...) noexcept { abort(); }
_LIBCPP_END_NAMESPACE_STD

#endif
