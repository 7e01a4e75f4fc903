// decode() over random problems: bijection, topological order, what the plan says about every expert.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "scheduler.h"

using namespace moeflex;

static std::mt19937 rng(1);
static int pick(int low, int high) { return low + (int)(rng() % (unsigned)(high - low + 1)); }

#define REQUIRE(condition)                                                                                         \
  do {                                                                                                             \
    if (!(condition)) {                                                                                            \
      std::printf("problem %d: %s\n", problem_idx, #condition);                                                    \
      return 1;                                                                                                    \
    }                                                                                                              \
  } while (0)

static Problem random_problem(int i) {
  Problem p = {};
  const bool big = i % 500 == 0;
  p.num_experts = big ? 512 : pick(1, 24);
  p.num_tokens = i % 7 == 0 ? 1 : pick(1, big ? 400 : 60);
  p.top_k = pick(1, 8);
  p.hidden = pick(1, 300);
  p.intermediate = pick(1, 300);
  static const int heights[][4] = {{128, 64, 32, 16}, {64, 32, 16, 8}, {8, 4, 2, 1}, {16, 16, 16, 16}, {256, 64, 8, 8}};
  p.num_heights = pick(1, 4);
  for (int h = 0; h < 4; ++h) p.heights[h] = heights[i % 5][h];
  p.row_align = i % 3 == 0 ? 1 : p.heights[p.num_heights - 1];
  p.gemm0_cols = 1 << pick(4, 7);
  p.gemm1_cols = 1 << pick(4, 7);
  p.chunk_tiles = i % 2 ? pick(1, 9) : 0;
  p.combine_tokens = i % 4 ? pick(1, 16) : 0;
  p.arrivals = pick(1, 2);
  p.world = pick(1, 3);
  p.num_blocks = pick(2, 140);
  p.num_comm_blocks = p.combine_tokens ? 0 : pick(0, p.num_blocks - 1);
  return p;
}

static std::vector<int> random_counts(const Problem& p, int i) {
  std::vector<int> counts(p.num_experts, 0);
  const int routes = i % 11 == 0 ? 0 : pick(0, max_rows(p));
  const int kind = i % 4, hot = pick(0, p.num_experts - 1);
  for (int r = 0; r < routes; ++r) {
    if (kind == 0) ++counts[hot];  // all to one expert
    else if (kind == 1 && rng() % 3) ++counts[hot];
    else ++counts[pick(0, p.num_experts - 1)];
  }
  return counts;
}

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 1000;
  long tiles_seen = 0;
  for (int problem_idx = 0; problem_idx < problems; ++problem_idx) {
    const Problem p = random_problem(problem_idx);
    const std::vector<int> counts = random_counts(p, problem_idx);
    const int bound = max_row_tiles(p);
    std::vector<int> te(bound), tr(bound), tn(bound), th(bound), et(p.num_experts + 1), er(p.num_experts + 1);
    PlanArrays arrays = {te.data(), tr.data(), tn.data(), th.data(), et.data(), er.data()};
    PlanView v = {build_plan(p, counts.data(), arrays, 0, 1), te.data(), tr.data(), tn.data(), th.data(), et.data()};
    const Plan& plan = v.plan;
    REQUIRE(plan.num_row_tiles <= bound);
    REQUIRE(plan.num_padded_rows <= max_padded_rows(p));
    REQUIRE(et[p.num_experts] == plan.num_row_tiles);

    // Two lanes fill what one lane fills.
    std::vector<int> te2(bound), tr2(bound), tn2(bound), th2(bound), et2(et), er2(er);
    PlanArrays again = {te2.data(), tr2.data(), tn2.data(), th2.data(), et2.data(), er2.data()};
    build_plan(p, counts.data(), again, 0, 2);
    build_plan(p, counts.data(), again, 1, 2);
    REQUIRE(te2 == te && tr2 == tr && tn2 == tn && th2 == th && et2 == et && er2 == er);

    // Row tiles cover each expert's rows once, disjointly, inside the buffer; a tail takes the smallest class.
    int next_row = 0;
    for (int e = 0; e < p.num_experts; ++e) {
      int rows = 0;
      REQUIRE(er[e] >= next_row && (er[e] % p.row_align == 0 || counts[e] == 0));
      for (int b = et[e]; b < et[e + 1]; ++b) {
        REQUIRE(te[b] == e && tr[b] == er[e] + rows);
        REQUIRE(tn[b] >= 1 && tn[b] <= th[b]);
        REQUIRE(b + 1 == et[e + 1] || (th[b] == p.heights[0] && tn[b] == th[b]));
        for (int h = 0; h < p.num_heights; ++h) REQUIRE(p.heights[h] < tn[b] || th[b] <= p.heights[h]);
        rows += tn[b];
        next_row = tr[b] + (p.row_align > 1 ? th[b] : tn[b]);
        REQUIRE(next_row <= plan.num_padded_rows);
      }
      REQUIRE(rows == counts[e]);
    }

    std::vector<char> seen0((size_t)plan.num_row_tiles * plan.num_cols0, 0), seen1((size_t)plan.num_row_tiles * plan.num_cols1, 0);
    std::vector<int> done0(plan.num_row_tiles, 0);
    int done1 = 0, combined = 0;
    for (int seq = 0; seq < plan.num_tiles; ++seq, ++tiles_seen) {
      const Tile t = decode(v, seq);
      if (t.stage == kCombine) {
        REQUIRE(t.col == combined && done1 == plan.num_row_tiles * plan.num_cols1);
        ++combined;
        continue;
      }
      REQUIRE(t.stage == kGemm0 || t.stage == kGemm1);
      REQUIRE(t.row_tile >= 0 && t.row_tile < plan.num_row_tiles && te[t.row_tile] == t.expert);
      const int cols = t.stage == kGemm0 ? plan.num_cols0 : plan.num_cols1;
      REQUIRE(t.col >= 0 && t.col < cols);
      char& once = (t.stage == kGemm0 ? seen0 : seen1)[(size_t)t.row_tile * cols + t.col];
      REQUIRE(!once);
      once = 1;
      if (t.stage == kGemm0) ++done0[t.row_tile];
      else {
        REQUIRE(done0[t.row_tile] == plan.num_cols0);  // topological
        ++done1;
      }
    }
    REQUIRE(done1 == plan.num_row_tiles * plan.num_cols1);
    REQUIRE(combined == (p.combine_tokens ? ceil_div(p.num_tokens, p.combine_tokens) : 0));
    REQUIRE(decode(v, plan.num_tiles).stage == kStop && decode(v, plan.num_tiles + 1000).stage == kStop);
  }
  std::printf("ok %d problems, %ld tiles\n", problems, tiles_seen);
  return 0;
}
