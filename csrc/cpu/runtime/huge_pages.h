// Memory that is written once and read from end to end many times, in pages of
// 2 MiB. The processor's prefetchers stop at the end of a page, and each page
// is looked up: a Zen 4's core reads 17 GB/s of pages of 4 KiB in one run, 25
// in four runs at a time, 29 with software prefetch 4 KiB ahead in each, and 31
// of pages of 2 MiB in any way (2026-11-26).
#pragma once

#include <cstdint>

namespace pkg::cpu {

// Of what of `bytes` from `data` on fills such pages, where the system can and
// its owner lets it. Before the memory is written to: pages that are free are
// taken at once.
void prefer_huge_pages(void* data, int64_t bytes);

// After that: has the others moved, so that address and content stay.
//
// 64 MiB that were free, written for the first time: 6 ms in such pages, 23 in
// small ones, and 15 more to move those. Where a hypervisor has taken free
// memory back, 110 in either (Zen 4, 2026-11-26).
void move_to_huge_pages(void* data, int64_t bytes);

}  // namespace pkg::cpu
