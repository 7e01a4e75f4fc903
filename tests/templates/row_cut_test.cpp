// What the prefill kernel takes from scheduler.h: an expert's rows cut into tiles, and the order of the tiles in
// column slices. argv[1]: number of random problems.
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

// Every row lies in one tile, tiles do not overlap, padding and the number of tiles are bounded.
static const char* check_cut(int num_rows, int max_tile_rows) {
    const RowCut cut = cut_rows(num_rows, max_tile_rows);
    if (cut.tile_rows > max_tile_rows || cut.tile_rows % kRowTileStep) return "size of a tile";
    if (cut.stride < cut.tile_rows || cut.stride % kRowTileAlignment) return "stride";
    if (cut.num_tiles * cut.tile_rows < num_rows) return "rows without a tile";
    if (num_rows > (cut.num_tiles - 1) * cut.tile_rows || num_rows == 0) {
        if (num_rows == 0 && cut.num_tiles != 0) return "a tile without rows";
    } else {
        return "an empty last tile";
    }
    if (cut.num_tiles > ceil_div(num_rows, max_tile_rows)) return "too many tiles";
    if (cut.num_tiles * cut.stride > num_rows + cut.num_tiles * kRowTileAlignment)
        return "more rows than the workspace has";
    return nullptr;
}

int main(int argc, char** argv) {
    const int num_problems = argc > 1 ? atoi(argv[1]) : 1000;
    std::mt19937 random(7);
    auto pick = [&](int low, int high) { return low + int(random() % unsigned(high - low + 1)); };
    for (int rows = 0; rows < 5000; ++rows)
        for (int most : {16, 80, 144, 160})
            if (const char* what = check_cut(rows, most)) return fail(what, rows);
    for (int problem = 0; problem < num_problems; ++problem) {
        const int num_experts = pick(1, problem % 50 ? 24 : 512), most = 16 * pick(1, 9);
        std::vector<int> first(num_experts + 1);
        for (int e = 0; e < num_experts; ++e) {
            const int rows = pick(0, 2) ? pick(0, 400) : 0;
            first[e + 1] = first[e] + cut_rows(rows, most).num_tiles;
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
