// From a layer's tensors to the parameters of a launch: expert matrices as tensor maps, biases, workspace.
// Knows no torch; the same maps as runtime/cuda_maps.py, the same sizes as runtime/cuda_launch.py.
#pragma once
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.h"
#include "layer_args.h"
#include "op_table.h"

namespace moeflex {
namespace cuda {

// One expert tensor: where it lies, and what a launch depends on.
struct ExpertTensor {
    const char* data;
    int64_t dim;
    int64_t sizes[3], strides[3];
};

// One [rows, k] matrix an expert; strides in elements, one of the first two is 1.
struct Matrix {
    const char* data;
    int64_t rows, k, row_stride, k_stride, expert_stride;
};

inline void refuse_layout(const std::string& text) {
    throw std::runtime_error("moeflex::moe_layer: " + text);
}

inline bool interleaved(const MoeflexCudaLayerSpec& s) {
    return s.gate_layout == kCudaGateInterleaved || s.gate_layout == kCudaGateInterleavedUpFirst;
}
inline bool up_first(const MoeflexCudaLayerSpec& s) {
    return s.gate_layout == kCudaGateConcatUpFirst || s.gate_layout == kCudaGateInterleavedUpFirst;
}

inline TensorMap encode(const Driver& driver, int dtype, const void* address, unsigned rank,
                        const uint64_t* dims, const uint64_t* strides_bytes, const uint32_t* box) {
    static const uint32_t ones[5] = {1, 1, 1, 1, 1};
    TensorMap map;
    driver.check(driver.cuTensorMapEncodeTiled(&map, dtype == 0 ? kTypeBfloat16 : kTypeFloat16,
                                               rank, address, dims, strides_bytes, box, ones, 0,
                                               kSwizzle128, kPromote128, 0),
                 "encoding a tensor map");
    return map;
}

// [k, rows, expert] when K-major, else [rows, k, expert] with 64 rows a box.
inline TensorMap expert_map(const Driver& driver, const MoeflexCudaLayerSpec& s, const Matrix& m,
                            int32_t box_rows, int32_t box_k) {
    const bool k_major = m.k_stride == 1;
    const uint64_t dims[3] = {uint64_t(k_major ? m.k : m.rows), uint64_t(k_major ? m.rows : m.k),
                              uint64_t(s.num_experts)};
    const uint64_t strides[2] = {2 * uint64_t(k_major ? m.row_stride : m.k_stride),
                                 2 * uint64_t(m.expert_stride)};
    const uint32_t box[3] = {64, uint32_t(k_major ? box_rows : box_k), 1};
    return encode(driver, s.dtype, m.data, 3, dims, strides, box);
}

// K-major gate and up in one map: [k, 8 rows, gate | up, rows / 8, expert]; the lower address first.
inline TensorMap slab_map(const Driver& driver, const MoeflexCudaLayerSpec& s, const Matrix& gate,
                          const Matrix& up, int32_t slab_rows) {
    if (gate.row_stride != up.row_stride || gate.expert_stride != up.expert_stride)
        refuse_layout("w1 and w3 must have the same strides; make both contiguous");
    const Matrix& low = gate.data < up.data ? gate : up;
    const Matrix& high = gate.data < up.data ? up : gate;
    const uint64_t dims[5] = {uint64_t(gate.k), 8, 2, uint64_t(gate.rows / 8),
                              uint64_t(s.num_experts)};
    const uint64_t strides[4] = {2 * uint64_t(gate.row_stride), uint64_t(high.data - low.data),
                                 16 * uint64_t(gate.row_stride), 2 * uint64_t(gate.expert_stride)};
    const uint32_t box[5] = {64, 8, 2, uint32_t(slab_rows / 16), 1};
    return encode(driver, s.dtype, low.data, 5, dims, strides, box);
}

// The workspace of a launch with T tokens, in bytes; parts begin at multiples of kPartAlignment.
struct Workspace {
    static constexpr size_t kPartAlignment = 1024;
    int64_t num_rows;
    size_t control, routes, h, y;

    Workspace(const MoeflexCudaLayerSpec& s, const MoeflexCudaKernel& k, int64_t num_tokens) {
        const int64_t num_routes = num_tokens * s.top_k, E = s.num_experts;
        const int64_t num_tiles =
            k.tile_rows ? num_routes / k.tile_rows + (num_routes < E ? num_routes : E) : 0;
        num_rows = k.rows_per_tile * num_tiles + k.rows_per_route * num_routes;
        control = 4 * size_t(k.control + k.control_per_expert * E + k.control_per_tile * num_tiles);
        routes = 4 * size_t(k.routes + k.routes_per_route * num_routes + k.routes_per_expert * E +
                            k.routes_per_tile * num_tiles + k.routes_per_row * num_rows);
        h = size_t(num_rows) * size_t(s.intermediate) * 2;
        y = size_t(num_rows) * size_t(s.hidden) * 2;
    }
    static size_t aligned(size_t bytes) {
        return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
    }
    // All but the counters, which outlive a launch.
    size_t scratch_bytes() const { return aligned(routes) + aligned(h) + aligned(y); }
};

// What a kernel is given besides the arguments of one call.
struct Parameters {
    TensorMap maps[6];  // gate, up, down, and those of the workspace
    LayerArgs args;
};

// The experts of one layer, bound to one kernel.
class BoundExperts {
  public:
    BoundExperts(const Driver& driver, const MoeflexCudaLayerSpec& s,
                 const std::vector<ExpertTensor>& tensors, const MoeflexCudaKernel& kernel)
        : spec_(s) {
        check_layouts(tensors);
        const bool separate = s.gate_layout == kCudaGateSeparate;
        const size_t num_up = separate ? 2 : 1;
        const size_t w2 = num_up * (s.has_b13 ? 2 : 1);
        Matrix gate, up;
        const bool two = split_gate_up(tensors, gate, up);
        const Matrix down = matrix(tensors[w2], s.w2_out_in, 0, s.hidden, 1);
        std::memset(&fixed_, 0, sizeof fixed_);
        LayerArgs& args = fixed_.args;
        args.top_k = s.top_k;
        args.num_experts = s.num_experts;
        args.hidden = s.hidden;
        args.intermediate = s.intermediate;
        args.up_first = two ? up.data < gate.data : up_first(s);
        bind_biases(tensors, num_up, w2);
        if (two && s.w13_out_in && kernel.slab_rows) {
            fixed_.maps[0] = fixed_.maps[1] = slab_map(driver, s, gate, up, kernel.slab_rows);
        } else {
            const int32_t rows = two ? kernel.pair_rows : kernel.whole_rows;
            fixed_.maps[0] = expert_map(driver, s, gate, rows, kernel.box_k);
            fixed_.maps[1] = two ? expert_map(driver, s, up, rows, kernel.box_k) : fixed_.maps[0];
        }
        fixed_.maps[2] = expert_map(driver, s, down, kernel.down_rows, kernel.box_k);
    }

    // The parameters of a launch whose scratch memory lies at `scratch`.
    Parameters parameters(const Driver& driver, const MoeflexCudaKernel& kernel,
                          const Workspace& workspace, unsigned char* scratch, int* control) const {
        Parameters p = fixed_;
        p.args.control = control;
        p.args.routes = (int*)scratch;
        p.args.h = scratch + Workspace::aligned(workspace.routes);
        p.args.y = p.args.h + Workspace::aligned(workspace.h);
        for (int i = 0; i < kernel.num_row_maps; ++i)
            p.maps[3 + i] = kernel.row_map_of[i]
                                ? row_map(driver, p.args.y, spec_.hidden, workspace.num_rows,
                                          kernel.row_map_rows[i])
                                : row_map(driver, p.args.h, spec_.intermediate, workspace.num_rows,
                                          kernel.row_map_rows[i]);
        return p;
    }

  private:
    TensorMap row_map(const Driver& driver, const void* data, int64_t width, int64_t rows,
                      int32_t box_rows) const {
        const uint64_t dims[2] = {uint64_t(width), uint64_t(rows)}, strides[1] = {2 * dims[0]};
        const uint32_t box[2] = {64, uint32_t(box_rows)};
        return encode(driver, spec_.dtype, data, 2, dims, strides, box);
    }

    // Rows first_row, first_row + row_step, ... of every expert's matrix.
    static Matrix matrix(const ExpertTensor& t, bool out_in, int64_t first_row, int64_t num_rows,
                         int64_t row_step) {
        const int64_t row_stride = t.strides[out_in ? 1 : 2], k_stride = t.strides[out_in ? 2 : 1];
        return {t.data + 2 * first_row * row_stride,
                num_rows,
                t.sizes[out_in ? 2 : 1],
                row_stride * row_step,
                k_stride,
                t.strides[0]};
    }

    // False when there is no up projection, or when both are neighbours along the contiguous axis and are one matrix.
    bool split_gate_up(const std::vector<ExpertTensor>& tensors, Matrix& gate, Matrix& up) const {
        const int64_t rows = spec_.intermediate;
        const bool out_in = spec_.w13_out_in;
        if (spec_.gate_layout == kCudaGateNone || spec_.gate_layout == kCudaGateSeparate) {
            gate = matrix(tensors[0], out_in, 0, rows, 1);
            if (spec_.gate_layout == kCudaGateNone) return false;
            up = matrix(tensors[1], out_in, 0, rows, 1);
            return true;
        }
        if (interleaved(spec_) && !out_in) {
            gate = matrix(tensors[0], out_in, 0, 2 * rows, 1);
            return false;
        }
        const int64_t second = interleaved(spec_) ? 1 : rows, step = interleaved(spec_) ? 2 : 1;
        gate = matrix(tensors[0], out_in, up_first(spec_) ? second : 0, rows, step);
        up = matrix(tensors[0], out_in, up_first(spec_) ? 0 : second, rows, step);
        return true;
    }

    void bind_biases(const std::vector<ExpertTensor>& tensors, size_t num_up, size_t w2) {
        LayerArgs& args = fixed_.args;
        args.bias13_expert_stride = spec_.intermediate;
        if (spec_.has_b13) {
            const ExpertTensor& bias = tensors[num_up];
            const int64_t second = 2 * (interleaved(spec_) ? 1 : spec_.intermediate);
            args.bias13_expert_stride = int(bias.strides[0]);
            args.bias_gate = bias.data;
            if (spec_.gate_layout == kCudaGateSeparate) {
                args.bias_up = tensors[num_up + 1].data;
            } else if (spec_.gate_layout != kCudaGateNone) {
                args.bias_gate = bias.data + (up_first(spec_) ? second : 0);
                args.bias_up = bias.data + (up_first(spec_) ? 0 : second);
            }
        }
        if (spec_.has_b2) args.bias_down = tensors[w2 + 1].data;
    }

    void check_layouts(const std::vector<ExpertTensor>& tensors) const {
        const bool separate = spec_.gate_layout == kCudaGateSeparate;
        const size_t num_up = separate ? 2 : 1, num_first = num_up * (spec_.has_b13 ? 2 : 1);
        const int64_t wide =
            spec_.intermediate * (separate || spec_.gate_layout == kCudaGateNone ? 1 : 2);
        if (tensors.size() != num_first + 1 + (spec_.has_b2 ? 1 : 0))
            refuse_layout("the plan takes another number of expert tensors; got " +
                          std::to_string(tensors.size()));
        for (size_t i = 0; i < tensors.size(); ++i) {
            if (i < num_up)
                check_matrix(tensors[i], i, wide, spec_.hidden, spec_.w13_out_in);
            else if (i < num_first)
                check_bias(tensors[i], i, wide);
            else if (i == num_first)
                check_matrix(tensors[i], i, spec_.hidden, spec_.intermediate, spec_.w2_out_in);
            else
                check_bias(tensors[i], i, spec_.hidden);
        }
    }

    void check_matrix(const ExpertTensor& t, size_t i, int64_t outs, int64_t ins,
                      bool out_in) const {
        check_shape(t, i, 3, out_in ? outs : ins, out_in ? ins : outs);
        if (t.strides[2] == 1 && t.strides[1] % 8 == 0 && t.strides[0] % 8 == 0 &&
            uintptr_t(t.data) % 16 == 0)
            return;
        refuse_layout("expert tensor " + std::to_string(i) +
                      " must start at a multiple of 16 bytes and have a contiguous last axis and "
                      "other strides that are multiples of 16 bytes; make it contiguous");
    }

    void check_bias(const ExpertTensor& t, size_t i, int64_t width) const {
        check_shape(t, i, 2, width, 1);
        if (t.strides[1] != 1 || t.strides[0] != width)
            refuse_layout("bias " + std::to_string(i) + " of the experts must be contiguous");
    }

    void check_shape(const ExpertTensor& t, size_t i, int64_t dim, int64_t first,
                     int64_t second) const {
        if (t.dim == dim && t.sizes[0] == spec_.num_experts && t.sizes[1] == first &&
            (dim == 2 || t.sizes[2] == second))
            return;
        std::string want = "[" + std::to_string(spec_.num_experts) + ", " + std::to_string(first);
        if (dim == 3) want += ", " + std::to_string(second);
        std::string got = "[";
        for (int64_t axis = 0; axis < t.dim; ++axis)
            got += (axis ? ", " : "") + std::to_string(t.sizes[axis]);
        refuse_layout("expert tensor " + std::to_string(i) + " must be " + want + "]; got " + got +
                      "]");
    }

    MoeflexCudaLayerSpec spec_;
    Parameters fixed_;
};

}  // namespace cuda
}  // namespace moeflex
