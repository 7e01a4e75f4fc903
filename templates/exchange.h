// What the ranks of one layer tell each other, and what follows for one of them: its rows, and the tokens to arrive.
//
// Every rank writes ids, weights and tokens into its own segment, all meet once, and each finds the routes to its own
// experts by reading the ids of all. Results come back into the home rank's segment. When parts of it may be written
// again:
//   * x, weights, parts, home counters: when all of a rank's tokens are back, every rank that read them is done;
//   * token count and ids are read by ranks to which nothing goes, too: two copies, by the parity of the call. Whoever
//     meets the others in call n + 1 has read those of call n.
#pragma once
#include "scheduler.h"

namespace moeflex {

// Ids of all ranks, where they lie. A route is token * slots + slot; an id is -1 where the route is not valid.
struct RouteTable {
    int world;
    int slots;              // routes of one token
    const int* num_tokens;  // [world]
    const int* const* ids;  // [world] of [T, slots]
    int first_expert;       // of this rank
    int num_experts;        // places on one rank

    // The rank's own index of an expert; -1 where another rank holds it.
    MOEFLEX_HD int local(int id) const {
        const int e = id - first_expert;
        return id >= 0 && e >= 0 && e < num_experts ? e : -1;
    }
};

// Rows of each expert, and their sum. counts [num_experts].
MOEFLEX_HD int count_rows(const RouteTable& t, int* counts) {
    int rows = 0;
    for (int e = 0; e < t.num_experts; ++e) counts[e] = 0;
    for (int r = 0; r < t.world; ++r)
        for (int i = 0; i < t.num_tokens[r] * t.slots; ++i) {
            const int e = t.local(t.ids[r][i]);
            if (e < 0) continue;
            ++counts[e];
            ++rows;
        }
    return rows;
}

// Rows are sorted by (expert, rank, token, slot): the order that one rank would have for the tokens of all ranks.
// An arrival is a token that this rank needs, once, however many of its rows it feeds.
struct Incoming {
    int num_arrivals;
    int* home_rank;  // [padded rows], as all that follow but the last
    int* home_route;
    int* tile_of_row;
    int* arrival_of_row;
    int* next_row;   // of the same token; -1 after the last
    int* first_row;  // [arrivals <= rows]
};

// Fills `in`. `cursors` [num_experts] starts as the plan's expert_row; `seen` [tokens of all ranks] is scratch.
MOEFLEX_HD void place_rows(const RouteTable& t, const PlanView& v, int* cursors, int* seen,
                           Incoming& in) {
    int tokens = 0;
    for (int r = 0; r < t.world; tokens += t.num_tokens[r++])
        for (int i = 0; i < t.num_tokens[r] * t.slots; ++i) {
            const int e = t.local(t.ids[r][i]);
            if (e < 0) continue;
            const int row = cursors[e]++;
            in.home_rank[row] = r;
            in.home_route[row] = i;
            in.arrival_of_row[row] = tokens + i / t.slots;
        }
    for (int i = 0; i < tokens; ++i) seen[i] = -1;
    in.num_arrivals = 0;
    for (int b = 0; b < v.plan.num_row_tiles; ++b)
        for (int row = v.tile_row[b]; row < v.tile_row[b] + v.tile_rows[b]; ++row) {
            in.tile_of_row[row] = b;
            int& number = seen[in.arrival_of_row[row]];
            if (number < 0) {
                number = in.num_arrivals++;
                in.first_row[number] = -1;
            }
            in.arrival_of_row[row] = number;
        }
    for (int b = v.plan.num_row_tiles - 1; b >= 0; --b)
        for (int row = v.tile_row[b] + v.tile_rows[b] - 1; row >= v.tile_row[b]; --row) {
            int& first = in.first_row[in.arrival_of_row[row]];
            in.next_row[row] = first;
            first = row;
        }
}

}  // namespace moeflex
