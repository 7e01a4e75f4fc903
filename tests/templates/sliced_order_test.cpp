// The order in which the prefill kernel takes tiles when the down projection runs in slices of columns.
// argv[1]: number of random problems.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../templates/scheduler.h"

using namespace moeflex;

static int fail(const char* what, int problem) {
    printf("%s (problem %d)\n", what, problem);
    return 1;
}

int main(int argc, char** argv) {
    const int num_problems = argc > 1 ? atoi(argv[1]) : 1000;
    std::mt19937 random(7);
    auto pick = [&](int low, int high) { return low + int(random() % unsigned(high - low + 1)); };
    for (int problem = 0; problem < num_problems; ++problem) {
        const int num_experts = pick(1, problem % 50 ? 24 : 512);
        std::vector<int> first(num_experts + 1);
        for (int e = 0; e < num_experts; ++e) {
            first[e + 1] = first[e] + (pick(0, 2) ? pick(0, 25) : 0);
        }
        const int num_row_tiles = first[num_experts], n0 = pick(1, 7), n1 = pick(1, 9),
                  num_slices = pick(1, 4);
        const SlicedOrder order{first.data(), num_experts, n0, n1, ceil_div(n1, num_slices)};
        std::vector<int> done0(num_row_tiles * n0 + 1), done1(num_row_tiles * n1 + 1);
        const int num_tiles = num_row_tiles * (n0 + n1);
        int last_slice = 0;
        for (int seq = 0; seq < num_tiles; ++seq) {
            const Tile t = decode_sliced(order, seq);
            if (t.row_tile < first[t.expert] || t.row_tile >= first[t.expert + 1])
                return fail("a row tile of another expert", problem);
            const bool gemm0 = t.stage == kGemm0;
            if (gemm0 != (seq < num_row_tiles * n0)) return fail("stage", problem);
            if (t.col < 0 || t.col >= (gemm0 ? n0 : n1)) return fail("column", problem);
            if ((gemm0 ? done0 : done1)[t.row_tile * (gemm0 ? n0 : n1) + t.col]++)
                return fail("a tile twice", problem);
            if (!gemm0) {
                const int slice = t.col / order.slice_cols;
                if (slice < last_slice) return fail("slices out of order", problem);
                last_slice = slice;
            }
        }
        if (decode_sliced(order, num_tiles).stage != kStop) return fail("no end", problem);
    }
    printf("ok %d problems\n", num_problems);
    return 0;
}
