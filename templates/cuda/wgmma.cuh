// The warpgroup matrix product: D[64, N] += A[64, 16] * B[N, 16]^T, fp32 accumulators, both
// operands in shared memory.
//
// Hand-written PTX instead of CUTLASS's atoms: the same instructions, a cold build three times
// shorter, no header package on the user's machine.
#pragma once
#include "ptx.cuh"
#include "types.cuh"

namespace moeflex {

MOEFLEX_DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
MOEFLEX_DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
MOEFLEX_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of the accumulators across a wgmma in flight.
template <int kCount>
MOEFLEX_DEVICE void pin_registers(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Descriptor of a 128-byte-swizzled operand at shared address `address` (1024-byte aligned before
// the k offset). K-major: rows of 64 elements, groups of 8 rows 1024 bytes apart. MN-major: k rows
// of 64 elements along M or N, groups of 8 k 1024 bytes apart, the next 64 elements along M or N
// `mn_stride` bytes on.
template <bool kMnMajor>
MOEFLEX_DEVICE u64 operand_descriptor(u32 address, u32 mn_stride) {
    u64 leading = kMnMajor ? mn_stride >> 4 : 1;
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (leading << 16) | (64ull << 32) |
           (1ull << 62);
}
// Descriptor units (16 bytes) from one k step of 16 to the next inside a swizzle atom.
template <bool kMnMajor>
constexpr int kStepUnits = kMnMajor ? 128 : 2;

#define MOEFLEX_REGS_4 "%0, %1, %2, %3"
#define MOEFLEX_OUTS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define MOEFLEX_REGS_8 MOEFLEX_REGS_4 ", %4, %5, %6, %7"
#define MOEFLEX_OUTS_8 MOEFLEX_OUTS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MOEFLEX_REGS_16 MOEFLEX_REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOEFLEX_OUTS_16                                                                         \
    MOEFLEX_OUTS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15])
#define MOEFLEX_REGS_32 \
    MOEFLEX_REGS_16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOEFLEX_OUTS_32                                                                            \
    MOEFLEX_OUTS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), \
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), \
        "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define MOEFLEX_REGS_64                                                                \
    MOEFLEX_REGS_32                                                                    \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOEFLEX_OUTS_64                                                                            \
    MOEFLEX_OUTS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), \
        "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), \
        "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), \
        "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), \
        "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MOEFLEX_REGS_128                                                                       \
    MOEFLEX_REGS_64                                                                            \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"         \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"         \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
    "%111"                                                                                     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "   \
    "%126, %127"
#define MOEFLEX_OUTS_128                                                                           \
    MOEFLEX_OUTS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), \
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), \
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),          \
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),        \
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),        \
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),        \
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define MOEFLEX_WGMMA_ASM(N, COUNT, TYPE, A, B, ACC, TA, TB)                                    \
    asm volatile(                                                                               \
        "{ .reg .pred p; setp.ne.b32 p, " ACC ", 0; wgmma.mma_async.sync.aligned.m64n" #N       \
        "k16.f32." TYPE " {" MOEFLEX_REGS_##COUNT "}, " A ", " B ", p, 1, 1, " TA ", " TB "; }" \
        : MOEFLEX_OUTS_##COUNT                                                                  \
        : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor ? 1 : 0), "n"(kBMnMajor ? 1 : 0))

#define MOEFLEX_WGMMA(N, COUNT, A, B, ACC, TA, TB)                                        \
    template <class Element, bool kAMnMajor, bool kBMnMajor>                              \
    struct Wgmma<Element, N, kAMnMajor, kBMnMajor> {                                      \
        MOEFLEX_DEVICE static void run(float (&d)[COUNT], u64 a, u64 b, int accumulate) { \
            if constexpr (Element::kIsBf16)                                               \
                MOEFLEX_WGMMA_ASM(N, COUNT, "bf16.bf16", A, B, ACC, TA, TB);              \
            else                                                                          \
                MOEFLEX_WGMMA_ASM(N, COUNT, "f16.f16", A, B, ACC, TA, TB);                \
        }                                                                                 \
    };

template <class Element, int kN, bool kAMnMajor, bool kBMnMajor>
struct Wgmma;
MOEFLEX_WGMMA(8, 4, "%4", "%5", "%6", "%7", "%8")
MOEFLEX_WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12")
MOEFLEX_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20")
MOEFLEX_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36")
MOEFLEX_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68")
MOEFLEX_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132")

}  // namespace moeflex
