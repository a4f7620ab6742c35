// Structs that Python fills by the names of their fields, and constants that Python declares, too
// (model/ops/cpu/shared_layout.py).
//
// `STRUCT` declares a struct and a description of its layout: each field's name, kind and offset, and the size of the
// struct. A library exports the descriptions, and Python reads them when it finds a kernel.

#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "cxx_library.h"

// FOR_EACH(macro, (a, b), (c, d)) expands to macro(a, b) macro(c, d). The preprocessor has no loops: each round of
// EXPAND scans the text again, which handles one more element, and there are enough rounds for 81 elements.
#define FOR_EACH(macro, ...) __VA_OPT__(EXPAND(FOR_EACH_STEP(macro, __VA_ARGS__)))
#define FOR_EACH_STEP(macro, first, ...) macro first __VA_OPT__(FOR_EACH_AGAIN PARENTHESES(macro, __VA_ARGS__))
#define FOR_EACH_AGAIN() FOR_EACH_STEP
#define PARENTHESES ()
#define EXPAND(...) EXPAND_27(EXPAND_27(EXPAND_27(__VA_ARGS__)))
#define EXPAND_27(...) EXPAND_9(EXPAND_9(EXPAND_9(__VA_ARGS__)))
#define EXPAND_9(...) EXPAND_3(EXPAND_3(EXPAND_3(__VA_ARGS__)))
#define EXPAND_3(...) EXPAND_1(EXPAND_1(EXPAND_1(__VA_ARGS__)))
#define EXPAND_1(...) __VA_ARGS__

// The kind of a field. All kinds have 64 bits.
template <class Field>
constexpr const char* kind_of_field() {
    static_assert(sizeof(Field) == 8);
    if constexpr (std::is_pointer_v<Field>) return "address";
    if constexpr (std::is_same_v<Field, long>) return "integer";
    if constexpr (std::is_same_v<Field, double>) return "number";
}

// A text that the compiler puts together. It is an error of the compilation if the text is too long.
struct Description {
    char text[2048] = {};
    long size = 0;

    constexpr void add(const char* part) {
        while (*part) text[size++] = *part++;
    }
    constexpr void add(long number) {
        if (number >= 10) add(number / 10);
        text[size++] = '0' + number % 10;
    }
    constexpr void add_line(const char* name, const char* kind, long offset) {
        for (const char* part : {name, " ", kind, " "}) add(part);
        add(offset);
        add("\n");
    }
};

#define DECLARE_FIELD(type, name) type name;
#define DESCRIBE_FIELD(type, name) description.add_line(#name, kind_of_field<type>(), offsetof(Self, name));

// Declares a struct: STRUCT(Name, (type, field), (type, field)). A field is a pointer, a long or a double.
#define STRUCT(Name, ...)                         \
    struct Name {                                 \
        FOR_EACH(DECLARE_FIELD, __VA_ARGS__)      \
        static constexpr Description describe() { \
            using Self = Name;                    \
            Description description;              \
            FOR_EACH(DESCRIBE_FIELD, __VA_ARGS__) \
            description.add("size ");             \
            description.add((long)sizeof(Self));  \
            return description;                   \
        }                                         \
    }

// Exports the description of a struct as the function `name`.
#define EXPORT_DESCRIPTION(name, ...)                                       \
    extern "C" const char* name() {                                         \
        static constexpr Description description = __VA_ARGS__::describe(); \
        return description.text;                                            \
    }

// Exports an integer constant, as `constant_NAME`.
#define EXPORT_CONSTANT(NAME) extern "C" const int64_t constant_##NAME = NAME;
