// A GPU on paper: every thread of every block is a fiber, one runs at a time, and a seeded generator says which one is
// next, which warps lag, and when a copy lands. What a kernel does between two waits is what hardware may do in that order; caches and
// the memory model are not emulated.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

namespace machine {

struct Index {
    unsigned x, y, z;
};

struct Warp {  // exchange slots of a warp-wide instruction
    uint32_t values[32];
    int arrived = 0, generation = 0;
};

struct NamedBarrier {
    const char* name = "a barrier of the block";
    int arrived = 0, generation = 0, any = 0, last_any = 0;
};

struct Fiber;
struct Block {
    Index index;
    std::vector<unsigned char> storage;
    unsigned char* shared = nullptr;  // 1024-byte aligned
    NamedBarrier barriers[16];
    std::vector<Warp> warps;
    NamedBarrier warpgroups[8];
};

struct Fiber {
    ucontext_t context;
    std::vector<unsigned char> stack;
    Block* block;
    Index thread;
    std::function<bool()> ready;  // empty: runnable
    const char* waits_for = "";
    bool done = false;
    unsigned laziness = 0;                        // sixteenths of its turns that it lets pass
    int groups_committed = 0, groups_landed = 0;  // bulk stores
    std::vector<std::function<void()>> open_group;
};

struct Machine {
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::deque<std::function<void()>> copies;  // in flight, in order of issue
    Fiber* current = nullptr;
    ucontext_t scheduler;
    std::mt19937 random;
    std::function<void()> kernel;
    Index grid;
    unsigned copy_pace = 8;  // one turn in so many lands copies
    bool misused = false;    // a barrier got more arrivals than it waits for

    // False when nothing can go on, or a barrier was misused.
    bool run(int num_blocks, int num_threads, size_t shared_bytes, unsigned seed,
             std::function<void()> entry) {
        random.seed(seed);
        kernel = std::move(entry);
        grid = {unsigned(num_blocks), 1, 1};
        copy_pace = random() % 2 ? 8 : 1u << 20;
        unsigned laziness = 0;
        for (int b = 0; b < num_blocks; ++b) {
            auto block = std::make_unique<Block>();
            block->index = {unsigned(b), 0, 0};
            block->storage.assign(shared_bytes + 1024, 0xFF);
            block->shared =
                block->storage.data() + (1024 - uintptr_t(block->storage.data()) % 1024) % 1024;
            block->warps.resize(num_threads / 32);
            for (auto& barrier : block->warpgroups) barrier.name = "its warpgroup";
            for (int t = 0; t < num_threads; ++t) {
                if (t % 32 == 0) laziness = random() % 3 ? 0 : random() % 16;
                add_fiber(block.get(), t, laziness);
            }
            blocks.push_back(std::move(block));
        }
        std::vector<Fiber*> alive;
        for (auto& fiber : fibers) alive.push_back(fiber.get());
        while (!alive.empty()) {
            if (misused) return false;
            bool moved = false, passed = false;
            const size_t first = random() % alive.size();
            for (size_t i = 0; i < alive.size(); ++i) {
                Fiber* fiber = alive[(first + i) % alive.size()];
                if (fiber->ready && !fiber->ready()) continue;
                if (random() % 16 < fiber->laziness) {
                    passed = true;
                    continue;
                }
                fiber->ready = nullptr;
                current = fiber;
                swapcontext(&scheduler, &fiber->context);
                moved = true;
                if (random() % copy_pace == 0) land(random() % 4);
                if (random() % 64 == 0) break;  // begin elsewhere
            }
            if (!moved && !passed && copies.empty()) {
                report(alive);
                return false;
            }
            if (!moved && !passed) land(1 + random() % 8);
            size_t kept = 0;
            for (Fiber* fiber : alive)
                if (!fiber->done) alive[kept++] = fiber;
            alive.resize(kept);
        }
        land(int(copies.size()));
        return true;
    }

    void land(int count) {
        for (; count > 0 && !copies.empty(); --count) {
            auto copy = std::move(copies.front());
            copies.pop_front();
            copy();
        }
    }

    void wait(const char* what, std::function<bool()> ready) {
        if (ready()) return;
        current->waits_for = what;
        current->ready = std::move(ready);
        swapcontext(&current->context, &scheduler);
    }
    void yield() {
        current->ready = [] { return true; };
        swapcontext(&current->context, &scheduler);
    }

  private:
    static void report(const std::vector<Fiber*>& stuck) {
        for (const Fiber* fiber : stuck)
            if (fiber->thread.x % 32 < 2)
                std::fprintf(stderr, "block %u thread %u waits for %s\n", fiber->block->index.x,
                             fiber->thread.x, fiber->waits_for);
    }
    static void trampoline();
    void add_fiber(Block* block, int t, unsigned laziness) {
        auto fiber = std::make_unique<Fiber>();
        fiber->block = block;
        fiber->thread = {unsigned(t), 0, 0};
        fiber->laziness = laziness;
        fiber->stack.resize(96 << 10);
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack.data();
        fiber->context.uc_stack.ss_size = fiber->stack.size();
        fiber->context.uc_link = &scheduler;
        makecontext(&fiber->context, trampoline, 0);
        fibers.push_back(std::move(fiber));
    }
};

inline Machine* gpu = nullptr;

inline void Machine::trampoline() {
    gpu->kernel();
    gpu->current->done = true;
}

// `total` threads arrive at a barrier; those that wait go on when the last is there.
inline int arrive(NamedBarrier& barrier, int total, bool waits, int value = 0) {
    barrier.any |= value;
    const int generation = barrier.generation;
    if (++barrier.arrived == total) {
        barrier.arrived = 0;
        barrier.last_any = barrier.any;
        barrier.any = 0;
        ++barrier.generation;
    } else if (waits) {
        gpu->wait(barrier.name,
                  [&barrier, generation] { return barrier.generation != generation; });
    }
    return barrier.last_any;
}

inline Warp& warp() {
    return gpu->current->block->warps[gpu->current->thread.x / 32];
}
inline void sync_warp() {
    Warp& w = warp();
    const int generation = w.generation;
    if (++w.arrived == 32) {
        w.arrived = 0;
        ++w.generation;
    } else {
        gpu->wait("its warp", [&w, generation] { return w.generation != generation; });
    }
}
// What every lane gave, seen by every lane.
inline std::vector<uint32_t> exchange(uint32_t value) {
    Warp& w = warp();
    w.values[gpu->current->thread.x % 32] = value;
    sync_warp();
    std::vector<uint32_t> seen(w.values, w.values + 32);
    sync_warp();
    return seen;
}

}  // namespace machine

#define threadIdx (machine::gpu->current->thread)
#define blockIdx (machine::gpu->current->block->index)
#define gridDim (machine::gpu->grid)
#define __device__
#define __forceinline__ inline

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};

template <class T>
T from_bits(uint32_t bits) {
    T value;
    std::memcpy(&value, &bits, 4);
    return value;
}
template <class T>
uint32_t to_bits(T value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline int lane_id() {
    return int(threadIdx.x % 32);
}
inline void __syncwarp() {
    machine::sync_warp();
}
inline int num_threads() {
    return int(machine::gpu->current->block->warps.size()) * 32;
}
inline void __syncthreads() {
    machine::arrive(machine::gpu->current->block->barriers[0], num_threads(), true);
}
inline int __syncthreads_or(int value) {
    return machine::arrive(machine::gpu->current->block->barriers[0], num_threads(), true, value);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return from_bits<T>(machine::exchange(to_bits(value))[lane & 31]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) {
    const int lane = lane_id();
    return from_bits<T>(machine::exchange(to_bits(value))[lane < delta ? lane : lane - delta]);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    const int lane = lane_id();
    return from_bits<T>(machine::exchange(to_bits(value))[lane ^ mask]);
}
inline unsigned __ballot_sync(unsigned, int value) {
    const auto seen = machine::exchange(value != 0);
    unsigned mask = 0;
    for (int i = 0; i < 32; ++i) mask |= seen[i] << i;
    return mask;
}
inline unsigned __match_any_sync(unsigned, int value) {
    const auto seen = machine::exchange(to_bits(value));
    unsigned mask = 0;
    for (int i = 0; i < 32; ++i) mask |= unsigned(seen[i] == to_bits(value)) << i;
    return mask;
}
inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
template <class T>
T __ldg(const T* p) {
    return *p;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
template <class T>
void __stcg(T* p, T value) {
    *p = value;
}
inline int atomicAdd(int* p, int value) {
    machine::gpu->yield();
    const int old = *p;
    *p += value;
    return old;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    const uint64_t both = (uint64_t(b) << 32) | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i)
        result |= unsigned((both >> (8 * ((select >> (4 * i)) & 7))) & 0xFF) << (8 * i);
    return result;
}
inline float __expf(float x) {
    return std::exp(x);
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float __uint_as_float(unsigned bits) {
    return from_bits<float>(bits);
}
