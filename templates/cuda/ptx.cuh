// One-instruction wrappers of the sm_90a instructions that the layer kernels use.
//
// Memory order between roles is stated at each wrapper; nothing here is wider than CTA scope inside
// a k loop (a cluster- or gpu-scope acquire there compiles to MEMBAR.ALL.GPU and CCTL.IVALL at
// every step, and the build refuses it).
#pragma once
#include "scheduler.h"

#define MOEFLEX_DEVICE __device__ __forceinline__

namespace moeflex {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Same bytes as CUtensorMap; passed by value as a __grid_constant__ kernel parameter.
struct alignas(64) TensorMap {
    u64 words[16];
};

#ifdef MOEFLEX_WATCHDOG
// {code, block, thread, detail} of the first wait that gave up; code 0 means that none did. Once
// one gave up all give up, so that the launch ends (with a wrong result) and the host can read
// this.
extern "C" __device__ int moeflex_watchdog[4];
__device__ int moeflex_watchdog[4];
enum WatchdogCode { kWaitMbarrier = 1, kWaitCounter = 2 };

struct SpinLimit {
    u64 start_ns;
    MOEFLEX_DEVICE static u64 now_ns() {
        u64 now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        return now;
    }
    MOEFLEX_DEVICE SpinLimit() : start_ns(now_ns()) {}
    MOEFLEX_DEVICE bool exceeded(int code, int detail) const {
        if (*(volatile int*)&moeflex_watchdog[0] != 0) return true;
        if (now_ns() - start_ns < 2000000000ull) return false;
        if (atomicCAS(&moeflex_watchdog[0], 0, code) == 0) {
            moeflex_watchdog[1] = blockIdx.x;
            moeflex_watchdog[2] = threadIdx.x;
            moeflex_watchdog[3] = detail;
        }
        return true;
    }
};
#endif

MOEFLEX_DEVICE u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier
// ------------------------------------------------------------------------------------------------------

struct Mbarrier {
    u64 state;

    MOEFLEX_DEVICE void init(int num_arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                     "r"(num_arrivals));
    }
    MOEFLEX_DEVICE void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this))
                     : "memory");
    }
    MOEFLEX_DEVICE void arrive(int count) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                     "r"(count)
                     : "memory");
    }
    // One arrival, and the phase also waits for `num_bytes` of bulk copies.
    MOEFLEX_DEVICE void arrive_expect(u32 num_bytes) {
        asm volatile(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
            "r"(num_bytes)
            : "memory");
    }
    // One arrival of this thread, once its cp.async so far have landed.
    MOEFLEX_DEVICE void arrive_after_cp_async() {
        asm volatile(
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this))
            : "memory");
    }
    MOEFLEX_DEVICE bool test(u32 parity) const {
        u32 done;
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, "
            "1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(this)), "r"(parity)
            : "memory");
        return done;
    }
    MOEFLEX_DEVICE void wait(u32 parity) const {
#ifdef MOEFLEX_WATCHDOG
        SpinLimit limit;
        while (!test(parity))
            if (limit.exceeded(kWaitMbarrier, static_cast<int>(shared_address(this)))) return;
#else
        asm volatile(
            "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, "
            "0x989680; @p bra done; bra again; "
            "done: }" ::"r"(shared_address(this)),
            "r"(parity)
            : "memory");
#endif
    }
};

MOEFLEX_DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Position in a ring of kDepth barriers: a consumer waits for `parity`, a producer for `parity ^
// 1`.
template <int kDepth>
struct RingPosition {
    int index = 0;
    u32 parity = 0;

    MOEFLEX_DEVICE void advance() {
        if (++index == kDepth) {
            index = 0;
            parity ^= 1;
        }
    }
    MOEFLEX_DEVICE void advance(int num_steps) {
        int next = index + num_steps;
        parity ^= (next / kDepth) & 1;
        index = next % kDepth;
    }
};

// ---- copies
// --------------------------------------------------------------------------------------------------------

constexpr u64 kEvictFirst = 0x12F0000000000000ull;
constexpr u64 kEvictNormal = 0x1000000000000000ull;

MOEFLEX_DEVICE void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
MOEFLEX_DEVICE void tma_load_2d(const TensorMap* map, Mbarrier* bar, void* dst, int c0, int c1,
                                u64 cache_hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_"
        "hint [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(shared_address(dst)),
        "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "l"(cache_hint)
        : "memory");
}
MOEFLEX_DEVICE void tma_load_3d(const TensorMap* map, Mbarrier* bar, void* dst, int c0, int c1,
                                int c2, u64 cache_hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_"
        "hint [%0], [%1, {%3, %4, "
        "%5}], [%2], %6;" ::"r"(shared_address(dst)),
        "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "l"(cache_hint)
        : "memory");
}
MOEFLEX_DEVICE void tma_load_5d(const TensorMap* map, Mbarrier* bar, void* dst, int c0, int c1,
                                int c2, int c3, int c4, u64 cache_hint) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_"
        "hint [%0], [%1, {%3, %4, "
        "%5, %6, %7}], [%2], %8;" ::"r"(shared_address(dst)),
        "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
        "l"(cache_hint)
        : "memory");
}
MOEFLEX_DEVICE void tma_store_2d(const TensorMap* map, const void* src, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(shared_address(src)), "r"(c0), "r"(c1)
        : "memory");
}
MOEFLEX_DEVICE void tma_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// The writes of this thread's bulk stores are complete.
MOEFLEX_DEVICE void tma_wait_written() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// The shared memory of this thread's bulk stores may be overwritten.
MOEFLEX_DEVICE void tma_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// 16 bytes, global to shared; zeros instead when not `valid` (the address is then not read).
MOEFLEX_DEVICE void cp_async_16(u32 dst, const void* src, bool valid) {
    int num_bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(num_bytes)
                 : "memory");
}

// ---- order
// ---------------------------------------------------------------------------------------------------------

// Shared memory written by ordinary stores or cp.async -> wgmma and bulk copies.
MOEFLEX_DEVICE void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
MOEFLEX_DEVICE void fence_async_all() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

MOEFLEX_DEVICE int load_relaxed(const int* address) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
MOEFLEX_DEVICE int load_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
MOEFLEX_DEVICE void add_release(int* address, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
MOEFLEX_DEVICE int fetch_add_acq_rel(int* address, int value) {
    int old;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(value)
                 : "memory");
    return old;
}
// Polls relaxed and acquires once: a polled acquire costs a fence a turn.
template <int kSleepNs = 20>
MOEFLEX_DEVICE void wait_at_least(const int* counter, int needed) {
#ifdef MOEFLEX_WATCHDOG
    SpinLimit limit;
#endif
    while (load_relaxed(counter) < needed) {
#ifdef MOEFLEX_WATCHDOG
        if (limit.exceeded(kWaitCounter, needed)) return;
#endif
        __nanosleep(kSleepNs);
    }
    load_acquire(counter);
}

MOEFLEX_DEVICE void named_barrier(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
MOEFLEX_DEVICE void named_barrier_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
template <int kRegisters>
MOEFLEX_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
MOEFLEX_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- stmatrix
// ------------------------------------------------------------------------------------------------------

MOEFLEX_DEVICE void store_matrix_x4(u32 dst, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

}  // namespace moeflex
