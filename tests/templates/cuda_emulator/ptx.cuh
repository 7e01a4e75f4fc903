// The wrappers of templates/cuda/ptx.cuh on the machine of machine.h.
#pragma once
#include "machine.h"
#include "scheduler.h"

#define MOEFLEX_DEVICE inline

namespace moeflex {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    u64 words[16];
};

// What a map says; words[0] points here. Extents and boxes in elements, strides in bytes, 16-bit elements.
struct MapContents {
    unsigned char* address;
    int rank;
    u64 dims[5], strides[5];
    u32 box[5];
};

inline u32 shared_address(const void* pointer) {
    return u32(static_cast<const u8*>(pointer) - machine::gpu->current->block->shared);
}
inline u8* shared_pointer(u32 address) {
    return machine::gpu->current->block->shared + address;
}
inline u32 swizzle_128(u32 address) {
    return address ^ ((address >> 7 & 7) << 4);
}

struct Mbarrier {
    u16 expected, pending;
    int num_bytes : 31;
    unsigned phase : 1;

    void settle() {
        if (pending || num_bytes) return;
        pending = expected;
        phase ^= 1;
    }
    void init(int num_arrivals) {
        expected = pending = u16(num_arrivals);
        num_bytes = 0;
        phase = 0;
    }
    void arrive(int count = 1) {
        machine::gpu->misused |= pending < count;
        pending = u16(pending - count);
        settle();
    }
    void arrive_expect(u32 bytes) {
        num_bytes += int(bytes);
        arrive();
    }
    void landed(u32 bytes) {
        num_bytes -= int(bytes);
        settle();
    }
    void arrive_after_cp_async() {
        machine::gpu->copies.push_back([this] { arrive(); });
    }
    bool test(u32 parity) const { return phase != parity; }
    void wait(u32 parity) const {
        machine::gpu->wait("an mbarrier", [this, parity] { return test(parity); });
    }
};

inline void fence_mbarrier_init() {}

template <int kDepth>
struct RingPosition {
    int index = 0;
    u32 parity = 0;

    void advance() {
        if (++index == kDepth) {
            index = 0;
            parity ^= 1;
        }
    }
    void advance(int num_steps) {
        int next = index + num_steps;
        parity ^= (next / kDepth) & 1;
        index = next % kDepth;
    }
};

constexpr u64 kEvictFirst = 1, kEvictNormal = 2;
inline void prefetch_map(const TensorMap*) {}

// Calls visit(box offset in bytes, address or null) for every element of the box at `at`.
template <class Visit>
void visit_box(const MapContents& map, const int (&at)[5], const Visit& visit) {
    u32 num_elements = 1;
    for (int axis = 0; axis < map.rank; ++axis) num_elements *= map.box[axis];
    for (u32 i = 0; i < num_elements; ++i) {
        u32 rest = i;
        unsigned char* address = map.address;
        bool inside = true;
        for (int axis = 0; axis < map.rank; ++axis) {
            const long long c = at[axis] + (long long)(rest % map.box[axis]);
            rest /= map.box[axis];
            inside = inside && c >= 0 && u64(c) < map.dims[axis];
            address += c * (long long)(axis ? map.strides[axis] : 2);
        }
        visit(2 * i, inside ? address : nullptr);
    }
}
inline const MapContents& contents(const TensorMap* map) {
    return *reinterpret_cast<const MapContents*>(map->words[0]);
}
inline void tma_load(const TensorMap* map, Mbarrier* bar, void* dst, const int (&at)[5]) {
    const MapContents* c = &contents(map);
    u8* shared = machine::gpu->current->block->shared;
    const u32 first = shared_address(dst);
    std::vector<int> position(at, at + 5);
    machine::gpu->copies.push_back([=] {
        const int from[5] = {position[0], position[1], position[2], position[3], position[4]};
        u32 num_bytes = 0;
        visit_box(*c, from, [&](u32 offset, const unsigned char* src) {
            u16 value = 0;
            if (src) std::memcpy(&value, src, 2);
            std::memcpy(shared + swizzle_128(first + offset), &value, 2);
            num_bytes += 2;
        });
        bar->landed(num_bytes);
    });
}
inline void tma_load_2d(const TensorMap* map, Mbarrier* bar, void* dst, int c0, int c1, u64) {
    tma_load(map, bar, dst, {c0, c1, 0, 0, 0});
}
inline void tma_load_3d(const TensorMap* map, Mbarrier* bar, void* dst, int c0, int c1, int c2,
                        u64) {
    tma_load(map, bar, dst, {c0, c1, c2, 0, 0});
}
inline void tma_load_5d(const TensorMap* map, Mbarrier* bar, void* dst, int c0, int c1, int c2,
                        int c3, int c4, u64) {
    tma_load(map, bar, dst, {c0, c1, c2, c3, c4});
}
inline void tma_store_2d(const TensorMap* map, const void* src, int c0, int c1) {
    const MapContents* c = &contents(map);
    u8* shared = machine::gpu->current->block->shared;
    const u32 first = shared_address(src);
    machine::gpu->current->open_group.push_back([=] {
        const int at[5] = {c0, c1, 0, 0, 0};
        visit_box(*c, at, [&](u32 offset, unsigned char* dst) {
            if (dst) std::memcpy(dst, shared + swizzle_128(first + offset), 2);
        });
    });
}
inline void tma_commit() {
    machine::Fiber* fiber = machine::gpu->current;
    ++fiber->groups_committed;
    auto group = std::move(fiber->open_group);
    fiber->open_group.clear();
    machine::gpu->copies.push_back([=] {
        for (auto& store : group) store();
        ++fiber->groups_landed;
    });
}
inline void tma_wait_read() {
    machine::Fiber* fiber = machine::gpu->current;
    machine::gpu->wait("its stores",
                       [fiber] { return fiber->groups_committed == fiber->groups_landed; });
}
inline void tma_wait_written() {
    tma_wait_read();
}
// Reads when it is issued, writes when it lands: both ends of what hardware may do.
inline void cp_async_16(u32 dst, const void* src, bool valid) {
    u8* shared = machine::gpu->current->block->shared;
    uint4 bytes = {};
    if (valid) std::memcpy(&bytes, src, 16);
    machine::gpu->copies.push_back([=] { std::memcpy(shared + dst, &bytes, 16); });
}

inline void fence_async_shared() {}
inline void fence_async_all() {}
inline int load_relaxed(const int* address) {
    return *static_cast<const volatile int*>(address);
}
inline int load_acquire(const int* address) {
    return load_relaxed(address);
}
inline void add_release(int* address, int value) {
    machine::gpu->yield();
    *address += value;
}
inline int fetch_add_acq_rel(int* address, int value) {
    return atomicAdd(address, value);
}
template <int kSleepNs = 20>
void wait_at_least(const int* counter, int needed) {
    machine::gpu->wait("a counter", [=] { return load_relaxed(counter) >= needed; });
}
inline void named_barrier(int id, int num_threads) {
    machine::arrive(machine::gpu->current->block->barriers[id], num_threads, true);
}
inline void named_barrier_arrive(int id, int num_threads) {
    machine::arrive(machine::gpu->current->block->barriers[id], num_threads, false);
}
template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

// Lane l gives the address of row l % 8 of matrix l / 8; register r of a lane holds two neighbours of matrix r:
// row lane / 4, columns 2 * (lane % 4) and the next.
inline void store_matrix_x4(u32 dst, u32 r0, u32 r1, u32 r2, u32 r3) {
    const u32 registers[4] = {r0, r1, r2, r3};
    const auto addresses = machine::exchange(dst);
    const int lane = lane_id();
    for (int matrix = 0; matrix < 4; ++matrix)
        for (int i = 0; i < 2; ++i) {
            const int row = lane / 4, column = 2 * (lane % 4) + i;
            const u16 value = u16(registers[matrix] >> (16 * i));
            std::memcpy(shared_pointer(addresses[8 * matrix + row] + 2 * column), &value, 2);
        }
    machine::sync_warp();
}

}  // namespace moeflex
