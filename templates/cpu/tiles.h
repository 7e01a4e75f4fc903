// Products on AMX tiles: bf16 pairs into fp32, 32 by 32 at a time. Every output is one chain over the steps in order,
// whatever the number of rows.
//
// `multiply_tiles`: tokens are the A operand. A panel of `gemm.h` is a B operand as it lies: 16 steps of 16 lanes are
// one tile. Rows that lie at equal distances are read in place; other rows, and the last steps of a row, go through a
// piece of 32 rows by 64 bytes.
//
// `multiply_groups`: weights are the A operand, read where they lie; tokens are the B operand, 16 of them to a *group*
// [step][16] words.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

namespace moeflex {

constexpr int kTileSteps = 16;  // steps (bf16 pairs) of one tile
constexpr int kTileBlock = 32;  // rows of one product

// Linux hands out the tile registers on request, once a process; false where it refuses.
inline bool tiles_permitted() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
}

// Registers 0-3: sums, 4-5: rows, 6-7: panel. `rows1` == 0 leaves out the second half of the rows.
inline void configure_tiles(int rows0, int rows1) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, kTileSteps, kTileSteps};
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = (uint8_t)rows[i];
        config.row_bytes[i] = rows[i] ? 64 : 0;
    }
    _tile_loadconfig(&config);
}

// Where the rows of one product are: `a[m]` + 64 bytes a block of steps.
struct TileRows {
    const char* const* a;
    int rows;
    long pitch_bytes;  // from row to row; 0: not equal, every block goes through `piece`
    alignas(64) char piece[kTileBlock * 64];

    TileRows(const char* const* rows_at, int count) : a(rows_at), rows(count) {
        pitch_bytes = count > 1 ? a[1] - a[0] : 64;
        for (int m = 2; m < count; ++m)
            if (a[m] - a[m - 1] != pitch_bytes) pitch_bytes = 0;
    }

    // `bytes` (at most 64) of every row from `offset` on; zeros follow.
    void copy(long offset, long bytes) {
        for (int m = 0; m < rows; ++m) {
            if (bytes < 64) std::memset(piece + m * 64, 0, 64);
            std::memcpy(piece + m * 64, a[m] + offset, (size_t)bytes);
        }
    }
};

// sums[m][32] (+)= rows times 32 columns of the panel; `step_pitch` words lie between its steps.
template <bool kBoth, class Ahead>
inline void multiply_block(TileRows& rows, long first_byte, const uint32_t* panel, long step_pitch,
                           long steps, float* sums, long pitch, bool add, Ahead& ahead) {
    float* low = sums + 16 * pitch;
    const long sums_bytes = pitch * (long)sizeof(float), panel_bytes = step_pitch * 4;
    if (add) {
        _tile_loadd(0, sums, sums_bytes);
        _tile_loadd(1, sums + 16, sums_bytes);
        if constexpr (kBoth) {
            _tile_loadd(2, low, sums_bytes);
            _tile_loadd(3, low + 16, sums_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (kBoth) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (long s = 0; s < steps; s += kTileSteps) {
        const char* from = rows.a[0] + first_byte + s * 4;
        long row_bytes = rows.pitch_bytes;
        if (row_bytes == 0 || s + kTileSteps > steps) {
            rows.copy(first_byte + s * 4, (s + kTileSteps > steps ? steps - s : kTileSteps) * 4);
            from = rows.piece;
            row_bytes = 64;
        }
        ahead.next();
        const uint32_t* b = panel + s * step_pitch;
        _tile_loadd(6, b, panel_bytes);
        _tile_loadd(4, from, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 16, panel_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kBoth) {
            _tile_loadd(5, from + 16 * row_bytes, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, sums_bytes);
    _tile_stored(1, sums + 16, sums_bytes);
    if constexpr (kBoth) {
        _tile_stored(2, low, sums_bytes);
        _tile_stored(3, low + 16, sums_bytes);
    }
}

// All rows by `lanes` columns (a multiple of 32). The panel's steps from `steps` up to the next whole tile are zero.
template <class Ahead>
inline void multiply_tiles(const char* const* a, int rows, long first_byte, const uint32_t* panel,
                           int lanes, long steps, float* sums, bool add, Ahead& ahead) {
    int configured = 0;
    for (int m = 0; m < rows; m += kTileBlock) {
        const int count = rows - m < kTileBlock ? rows - m : kTileBlock;
        if (count != configured)
            configure_tiles(count < 16 ? count : 16, count > 16 ? count - 16 : 0);
        configured = count;
        TileRows block(a + m, count);
        for (int n = 0; n < lanes; n += 32) {
            float* out = sums + (long)m * lanes + n;
            if (count > 16)
                multiply_block<true>(block, first_byte, panel + n, lanes, steps, out, lanes, add,
                                     ahead);
            else
                multiply_block<false>(block, first_byte, panel + n, lanes, steps, out, lanes, add,
                                      ahead);
        }
    }
    _tile_release();
}

// 16 weight rows (output columns) whose elements are contiguous; those from `exist` on are taken as zero.
struct TileWeights {
    const char* at;
    long row_bytes;  // from one row to the next
    int exist;

    // Bytes [first, last) of the rows as tiles one behind the other, zeros after the end.
    void copy(long first, long last, char* tiles) const {
        const long whole = first + (last - first) / 64 * 64;
        for (int i = 0; i < exist; ++i)
            for (long b = first; b < whole; b += 64)
                std::memcpy(tiles + (b - first) * 16 + i * 64, at + i * row_bytes + b, 64);
        if (whole < last) std::memset(tiles + (whole - first) * 16, 0, 16 * 64);
        for (int i = 0; i < exist && whole < last; ++i)
            std::memcpy(tiles + (whole - first) * 16 + i * 64, at + i * row_bytes + whole,
                        (size_t)(last - whole));
        for (int i = exist; i < 16; ++i)
            for (long b = first; b < last; b += 64)
                std::memset(tiles + (b - first) * 16 + i * 64, 0, 64);
    }
};

// Tiles of 64 bytes by 16 rows along the weight rows: `pitch` from row to row, `step` from tile to tile.
struct TileSource {
    const char* at;
    long pitch, step;
};

struct GroupSums {
    alignas(64) float sums[2][2][16][kGroup];  // [weights][group][output][token]
};

// sums (+)= weights times groups over `num_tiles` tiles. Tiles 0-3: sums, 4-5: weights, 6-7: groups.
template <bool kTwoGroups, class Ahead>
inline void multiply_groups(TileSource left, TileSource right, const uint32_t* group0,
                            const uint32_t* group1, long num_tiles, GroupSums& sums, bool add,
                            Ahead& ahead) {
    auto& out = sums.sums;
    if (add) {
        _tile_loadd(0, out[0][0], 64);
        _tile_loadd(2, out[1][0], 64);
        if constexpr (kTwoGroups) {
            _tile_loadd(1, out[0][1], 64);
            _tile_loadd(3, out[1][1], 64);
        }
    } else {
        _tile_zero(0);
        _tile_zero(2);
        if constexpr (kTwoGroups) {
            _tile_zero(1);
            _tile_zero(3);
        }
    }
    for (long i = 0; i < num_tiles; ++i) {
        const long words = i * 16 * kGroup;
        _tile_loadd(6, group0 + words, 64);
        _tile_loadd(4, left.at + i * left.step, left.pitch);
        _tile_dpbf16ps(0, 4, 6);
        ahead.next();
        _tile_loadd(5, right.at + i * right.step, right.pitch);
        _tile_dpbf16ps(2, 5, 6);
        ahead.next();
        if constexpr (kTwoGroups) {
            _tile_loadd(7, group1 + words, 64);
            _tile_dpbf16ps(1, 4, 7);
            ahead.next();
            _tile_dpbf16ps(3, 5, 7);
            ahead.next();
        }
    }
    _tile_stored(0, out[0][0], 64);
    _tile_stored(2, out[1][0], 64);
    if constexpr (kTwoGroups) {
        _tile_stored(1, out[0][1], 64);
        _tile_stored(3, out[1][1], 64);
    }
}

}  // namespace moeflex
