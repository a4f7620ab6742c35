// Tensors as rows of numbers, and loops over rows and over the vectors of a row.

#pragma once

#include "kernel.h"

// Rows of `size` numbers each, `stride` numbers apart.
template <class Number>
struct StridedRows {
    Number* from;
    long stride, size;

    Number* operator[](long row) const { return from + row * stride; }
};

// Visits the rows of this task among `count`.
template <class Visit>
void for_each_row(long count, long task, long num_tasks, Visit visit) {
    for (long row = count * task / num_tasks; row < count * (task + 1) / num_tasks; row++) visit(row);
}

// Visits the vectors of a row of `size` numbers: the index of the vector's first number, and its valid lanes.
template <class Visit>
void for_each_vector(long size, Visit visit) {
    for (long i = 0; i < size; i += WIDTH) visit(i, first_lanes(size - i));
}
